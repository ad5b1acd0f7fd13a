"""What a gateway can be told. These Structs are the schema of its YAML file, of ``HOTPREFIX_…``
variables and of its flags; how those three are merged is ``hotprefix.settings``'s business."""

from typing import Literal

import msgspec

Bytes = int
Seconds = float


class Listen(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where a listener is. Port 0 lets the kernel choose. Beyond loopback needs ``keys_file``."""

    host: str = "127.0.0.1"
    port: int = 8000


class Events(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An engine's KV events. vLLM binds only where its endpoint holds ``*``, ``::`` or is ``ipc://``;
    else it connects, and ``bind`` must be true here. ``replay`` is its replay endpoint."""

    endpoint: str
    replay: str | None = None
    bind: bool = False
    topic: str = ""


class NodeEvents(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A cache node's events and where it answers questions about them, as its own configuration has
    them."""

    endpoint: str
    replay: str


class Node(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A cache node. ``name`` is the node's own name for itself; no worker may have the same."""

    name: str
    events: NodeEvents


class Worker(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An engine as the gateway sees it. ``rank`` is the data-parallel rank, sent as a header.
    Without ``events`` the worker is known by routing history alone. ``node`` is the name of the cache
    node beside it; what that holds counts once the node says that it serves a worker of this name."""

    name: str
    url: str
    events: Events | None = None
    rank: int | None = None
    node: str | None = None
    api_key: str | None = None


class Health(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A worker is down after one refused connection or ``failures`` other failed checks in a row,
    and up after one good check."""

    interval_s: Seconds = 1.0
    timeout_s: Seconds = 5.0
    failures: int = 3


class Limits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``body_bytes``: 413 above. ``header_bytes``: 431 above. ``requests``: 503 above so many in flight.
    ``head_s`` and ``body_s``: how long a request may take to arrive. ``write_s``: a client that takes
    nothing of its answer for so long is cut off."""

    body_bytes: Bytes = 10_000_000
    header_bytes: Bytes = 65_536
    headers: int = 100
    requests: int = 4096
    head_s: Seconds = 10.0
    body_s: Seconds = 30.0
    write_s: Seconds = 60.0


class Upstream(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``first_byte_s`` and ``idle_s`` bound the wait for the first and for each further byte.
    At most ``retry_share`` of requests (and always ``retry_floor`` a second) may be tried again."""

    connect_s: Seconds = 2.0
    first_byte_s: Seconds = 600.0
    idle_s: Seconds = 300.0
    attempts: int = 3
    retry_share: float = 0.2
    retry_floor: float = 3.0


class Tokens(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``tokenizers`` maps a base model id to a folder or hub name; a model that is not listed is
    looked up where its engine says it loaded it from. Prompts that take longer than ``deadline_s``
    are routed by their text."""

    tokenizers: dict[str, str] = {}
    threads: int = 2
    pending: int = 256
    deadline_s: Seconds = 2.0


class Index(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``bytes`` bounds the index, ``learned_bytes`` the routing history, ``predicted_s`` how long a
    routed prompt counts as held before the engine has said so."""

    bytes: Bytes = 1_000_000_000
    learned_bytes: Bytes = 250_000_000
    predicted_s: Seconds = 2.0


class Gateway(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Everything. ``policy`` is a name of the table in ``policies.routing`` with its parameters,
    ``{name: prefix, max_imbalance_tokens: 4096}``. ``secret_file`` holds the deployment's secret;
    without one, a fresh secret lasts as long as the process. ``grace_s``: how long requests in flight
    may go on after a stop was asked for."""

    listen: Listen = msgspec.field(default_factory=Listen)
    admin: Listen = msgspec.field(default_factory=lambda: Listen(port=8001))
    workers: list[Worker] = []
    nodes: list[Node] = []
    policy: dict[str, object] = msgspec.field(default_factory=lambda: {"name": "prefix"})
    keys_file: str | None = None
    secret_file: str | None = None
    hit_headers: Literal["auto", "always", "never"] = "auto"
    session_header: str = "x-session-id"
    seed: int = 0
    grace_s: Seconds = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    health: Health = msgspec.field(default_factory=Health)
    limits: Limits = msgspec.field(default_factory=Limits)
    upstream: Upstream = msgspec.field(default_factory=Upstream)
    tokens: Tokens = msgspec.field(default_factory=Tokens)
    index: Index = msgspec.field(default_factory=Index)
