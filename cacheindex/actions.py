"""What a feed decides, and its limits."""

from typing import Generic

import msgspec

from cacheindex.pending import Body


class Apply(msgspec.Struct, Generic[Body], frozen=True):
    body: Body


class Ignore(msgspec.Struct, frozen=True):
    why: str


class Resync(msgspec.Struct, frozen=True):
    """Ask the source for its batches from this number on. Answers go to ``replayed``, then
    ``replay_ended``; ``tick`` notices when they stay away. One at a time (see ``replaying``)."""

    from_seq: int


class Forget(msgspec.Struct, frozen=True):
    """Drop all this source said."""

    reason: str


Action = Apply[Body] | Ignore | Resync | Forget


class Limits(msgspec.Struct, frozen=True):
    """Times in seconds. Pending batches wait for a hole before them to be filled; ``reorder`` is
    how long, and how many, without a replay. ``quiet`` is how long after the last batch it is asked
    whether that was really the last one."""

    pending_batches: int = 4096
    pending_bytes: int = 64 * 1024 * 1024
    reorder_s: float = 0.5
    reorder_batches: int = 64
    replay_idle_s: float = 2.0
    replay_total_s: float = 30.0
    cooldown_s: float = 0.1
    cooldown_most_s: float = 30.0
    rebuild_cooldown_s: float = 60.0
    attempts: int = 2
    quiet_s: float = 2.0
    window: int = 8
    wrong: int = 3
    recent: int = 512
