"""What a node can be told. The defaults are those of one machine with one node."""

import os
import socket as sockets
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from policies.eviction import DEFAULT

Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Memory(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``bytes`` is the budget for KV. ``touch`` takes it all at the start, so that no store waits for pages
    and a lack of memory shows then. ``huge_pages`` asks the kernel for them. ``records``: the most that are
    kept; 0 derives it from ``bytes``."""

    bytes: Bytes = 4 * 1024**3
    touch: bool = False
    huge_pages: bool = False
    records: int = 0


class Events(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where events are published and questions answered; "" for files beside the socket. Beyond this machine
    only with ``allow_remote``: whoever reaches them can read which keys are held, and nothing else."""

    endpoint: str = ""
    replay: str = ""
    allow_remote: bool = False


class Admin(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The operators' listener; beyond loopback only with ``keys_file``."""

    host: str = "127.0.0.1"
    port: int = 8002


class Node(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Everything. ``name`` is what gateways call this node, "" for the machine's name. ``socket`` is where
    engines connect, "" for a folder of this user's. ``eviction`` is a name of the table in
    ``policies.eviction`` with its parameters. ``keys_file`` holds API keys (``hotprefix keys new``); those of
    admins open the admin listener."""

    name: str = ""
    socket: str = ""
    memory: Memory = msgspec.field(default_factory=Memory)
    eviction: dict[str, object] = msgspec.field(default_factory=lambda: {"name": DEFAULT})
    events: Events = msgspec.field(default_factory=Events)
    admin: Admin = msgspec.field(default_factory=Admin)
    keys_file: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def name_of(config: Node) -> str:
    return config.name or sockets.gethostname()


def socket_of(config: Node) -> Path:
    if config.socket:
        return Path(config.socket)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "hotprefix" if runtime else Path(f"/tmp/hotprefix-{os.geteuid()}")
    return folder / "node.sock"


def endpoints_of(config: Node) -> tuple[str, str]:
    """Events and replay."""
    path = socket_of(config)
    return (
        config.events.endpoint or f"ipc://{path}.events",
        config.events.replay or f"ipc://{path}.replay",
    )


def records_of(config: Node) -> int:
    """How many records the directory has room for."""
    return config.memory.records or min(4_000_000, max(4096, config.memory.bytes // 16_384))
