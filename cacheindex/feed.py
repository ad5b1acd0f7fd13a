from typing import Literal

Trust = Literal["exact", "syncing", "suspect", "learned"]
