"""Who may use the admin listener: the digests of admins' keys, from the same file that gateways read."""

import hashlib
import hmac
from pathlib import Path

import msgspec


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    sha256: str
    admin: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Entry]


def admin_digests(path: Path) -> list[bytes]:
    """Raises ValueError, with words for the operator."""
    try:
        entries = msgspec.yaml.decode(path.read_bytes(), type=_File).keys
        digests = [bytes.fromhex(entry.sha256) for entry in entries if entry.admin]
    except OSError as error:
        raise ValueError(f"keys_file {path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"keys_file {path}: {error}") from error
    if not digests:
        raise ValueError(f"keys_file {path} has no admin's key: `hotprefix keys new NAME --admin` makes one")
    if any(len(digest) != hashlib.sha256().digest_size for digest in digests):
        raise ValueError(f"keys_file {path}: a sha256 has 64 hex digits")
    return digests


def admitted(authorization: str, digests: list[bytes]) -> bool:
    """Whether ``Bearer KEY`` is an admin's. Compared as digests, so time tells nothing about a key."""
    scheme, _, key = authorization.partition(" ")
    digest = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
    found = [hmac.compare_digest(digest, known) for known in digests]
    return scheme.lower() == "bearer" and any(found)
