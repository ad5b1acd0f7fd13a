"""What the scheduler's side tells the workers' side to copy, and how it is told what came of it."""

import msgspec

from cachenode.wire import Grant, Piece


class Load(msgspec.Struct, frozen=True):
    """Copy leased blocks into the engine's: the prompt's block ``first + i`` goes to ``blocks[i]``. What
    ``pieces`` do not cover is reported as bad; without ``blocks`` only the end is reported."""

    request: str
    session: str
    lease: int
    first: int
    blocks: list[int]
    pieces: list[Piece]


class Store(msgspec.Struct, frozen=True):
    """Copy the engine's blocks into granted space: ``blocks[i]`` is the prompt's block ``first + i``."""

    job: int
    session: str
    first: int
    blocks: list[int]
    grants: list[Grant]


class Work(msgspec.Struct, frozen=True):
    """What one step of the engine carries. ``session`` is the open one, "" without; ``idle``: the step
    computes nothing, so a worker may wait a little for copies to end."""

    session: str = ""
    loads: list[Load] = []
    stores: list[Store] = []
    idle: bool = False


class Report(msgspec.Struct):
    """What ranks said of stores: job → how many ranks have ended it, and the jobs that failed on one."""

    ended: dict[int, int] = {}
    failed: set[int] = set()

    def merge(self, other: "Report") -> "Report":
        ended = dict(self.ended)
        for job, ranks in other.ended.items():
            ended[job] = ended.get(job, 0) + ranks
        return Report(ended, self.failed | other.failed)
