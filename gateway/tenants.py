"""API keys, the tenants who own them, and the salt that keeps tenants' caches apart.

The keys file is YAML: ``keys: [{tenant: NAME, sha256: HEX, admin: false}]``. Only digests are
kept, so neither the file nor the process's memory holds a key once it has been handed out.
"""

import base64
import hashlib
import hmac
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

MIN_SECRET_BYTES = 16


class Tenant(msgspec.Struct, frozen=True):
    name: str
    admin: bool = False


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: Annotated[str, msgspec.Meta(min_length=1)]
    sha256: str
    admin: bool = False


class KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyEntry]


class BadKeysFile(ValueError):
    """The keys file or the secret file cannot be used; the message says what to do."""


class Tenants:
    """Who may call. Without keys there is one tenant, who is an admin."""

    def __init__(self, entries: Sequence[KeyEntry], secret: bytes) -> None:
        self._by_digest = {
            bytes.fromhex(entry.sha256): Tenant(entry.tenant, entry.admin) for entry in entries
        }
        self._secret = secret
        self.open = not entries
        self.several = len({entry.tenant for entry in entries}) > 1

    def who(self, authorization: str | None) -> Tenant | None:
        """The owner of ``Bearer KEY``; None when there is none.

        The key is hashed before it is compared, so the time taken tells nothing about a stored key.
        """
        if self.open:
            return Tenant("", admin=True)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            return None
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        for known, tenant in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                return tenant
        return None

    def salt(self, tenant: Tenant, client_salt: str | None) -> str | None:
        """The ``cache_salt`` to send: the client's own while there is one tenant, else one that no
        two tenants share, whatever they send."""
        if not self.several:
            return client_salt
        fields = b"".join(
            len(part).to_bytes(4, "little") + part
            for part in (tenant.name.encode(), (client_salt or "").encode("utf-8", "surrogatepass"))
        )
        digest = hmac.digest(self._secret, b"cache_salt" + fields, hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()


def load_tenants(keys_file: str | None, secret: bytes) -> Tenants:
    """Raises BadKeysFile for a file that is missing, malformed or names no key."""
    if keys_file is None:
        return Tenants([], secret)
    path = Path(keys_file)
    try:
        content = msgspec.yaml.decode(path.read_bytes(), type=KeysFile)
        tenants = Tenants(content.keys, secret)
    except OSError as error:
        raise BadKeysFile(f"keys_file {keys_file}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise BadKeysFile(
            f"keys_file {keys_file}: {error}; it holds `keys: [{{tenant: NAME, sha256: HEX}}]`, "
            "and `hotprefix keys new NAME` prints such an entry"
        ) from error
    if not content.keys:
        raise BadKeysFile(f"keys_file {keys_file} names no key; `hotprefix keys new NAME` prints an entry")
    return tenants


def load_secret(secret_file: str | None) -> bytes:
    """The deployment's secret; a fresh one that lasts as long as the process where no file is named.

    Raises BadKeysFile for a file that others can read or that holds fewer than 16 bytes.
    """
    if secret_file is None:
        return secrets.token_bytes(32)
    path = Path(secret_file)
    try:
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise BadKeysFile(f"secret_file {secret_file}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadKeysFile(f"secret_file {secret_file} can be read by others: chmod 600 it")
    if len(secret) < MIN_SECRET_BYTES:
        raise BadKeysFile(f"secret_file {secret_file} holds {len(secret)} bytes, at least 16 are needed")
    return secret


def new_key(tenant: str, *, admin: bool = False) -> tuple[str, KeyEntry]:
    """A fresh key, to be shown once, and the entry that admits it."""
    key = "hp-" + secrets.token_urlsafe(32)
    return key, KeyEntry(tenant, hashlib.sha256(key.encode()).hexdigest(), admin)
