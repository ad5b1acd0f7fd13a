"""Holds the fault switches of one engine and draws its seeded lots."""

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from loadtest.sim.config import Faults


class FaultBox:
    """Current switches. Read by the engine's loop; change it on that loop."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.now = faults or Faults()
        self._random = random.Random(self.now.seed)

    def set(self, changes: Mapping[str, Any]) -> Faults:
        """Change some switches, keep the others. Raises msgspec.ValidationError for unknown names
        and wrong types."""
        merged = {**msgspec.structs.asdict(self.now), **changes}
        self.now = msgspec.convert(merged, Faults)
        self._random = random.Random(self.now.seed)
        return self.now

    def clear(self) -> None:
        """Health again."""
        self.now = Faults()

    def lot(self, share: float) -> bool:
        """True with probability ``share``. Draws nothing when the share is 0."""
        return share > 0 and self._random.random() < share

    def take(self, counter: str) -> bool:
        """Use up one of a counted fault; False when none is left."""
        left: int = getattr(self.now, counter)
        if left <= 0:
            return False
        self.now = msgspec.structs.replace(self.now, **{counter: left - 1})
        return True
