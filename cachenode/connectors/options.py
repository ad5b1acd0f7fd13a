"""What an operator writes in ``kv_connector_extra_config``: the ``hotprefix.`` keys, and the secret."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cachenode.wire import Mode

PREFIX = "hotprefix."
MIN_SECRET_BYTES = 16
POLICY = "recompute"


class BadSetup(ValueError):
    """The engine's settings do not allow the connector; the message says which, and what to write."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``socket``: the node's control socket; ``worker``: the engine's name in the gateway; ``hold``: the
    most of the engine's blocks that stores may hold, as a share; ``mode``: "copy" sends bytes over the
    socket, for an engine that cannot map the node's memory; ``touch``: take all pages of an engine's KV in
    main memory at the start, so that no load has to."""

    socket: str
    worker: str
    secret_file: str | None = None
    mode: Mode = "map"
    hold: float = 0.5
    touch: bool = True


def read_options(extra: Mapping[str, Any]) -> Options:
    """Raises BadSetup. Keys without our prefix are other people's."""
    mine = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    known = [field.encode_name for field in msgspec.structs.fields(Options)]
    for key in mine:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.0)[0]
            raise BadSetup(f"kv_connector_extra_config has {PREFIX}{key}; did you mean {PREFIX}{near}?")
    for key in ("socket", "worker"):
        if not mine.get(key):
            raise BadSetup(f'kv_connector_extra_config needs "{PREFIX}{key}": "…"')
    try:
        options = msgspec.convert(mine, Options)
    except msgspec.ValidationError as error:
        raise BadSetup(f"kv_connector_extra_config: {error} (of {PREFIX}*)") from None
    if not 0 < options.hold <= 1:
        raise BadSetup(f'"{PREFIX}hold" must be more than 0 and at most 1, not {options.hold}')
    return options


def check_policy(policy: str) -> None:
    """Raises BadSetup: with any other policy a load that fails ends the request with an error."""
    if policy != POLICY:
        raise BadSetup(
            f'write "kv_load_failure_policy": "{POLICY}" in --kv-transfer-config beside '
            f'"kv_connector": it is "{policy}", and then a lost node would fail requests'
        )


def read_secret(secret_file: str | None) -> bytes | None:
    """The deployment's secret, as the gateway reads it; None where no file is named. Raises BadSetup."""
    if secret_file is None:
        return None
    path = Path(secret_file)
    try:
        secret, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise BadSetup(f"{PREFIX}secret_file {secret_file}: {error.strerror}") from error
    if mode & 0o077:
        raise BadSetup(f"{PREFIX}secret_file {secret_file} can be read by others: chmod 600 it")
    if len(secret) < MIN_SECRET_BYTES:
        raise BadSetup(
            f"{PREFIX}secret_file {secret_file} holds {len(secret)} bytes, "
            f"at least {MIN_SECRET_BYTES} are needed"
        )
    return secret
