"""Chat bodies that share their beginning in groups and never repeat in their last quarter."""

import json
import random

from loadtest.tinymodel import WORDS

GROUPS = 16
SLOTS = 256
SIZES = {"small": 100, "big": 32 * 1024}

_SNIPPETS = 2048


class Bodies:
    """An endless stream of JSON bodies of one size, from a seed.

    ``size`` is the length of the prompt in characters. Request i belongs to group i % 16, whose
    members share the first three quarters; the last quarter begins with a number that is never used
    twice with one ``seed`` and goes on with snippets drawn anew. So no cache of whole texts can
    answer, and prefixes shared by a group can be found by whoever looks for them.
    """

    def __init__(self, model: str, size: int, stream: bool, seed: int) -> None:
        self._random = random.Random(f"{seed}/{size}/{stream}")
        shared = size * 3 // 4
        texts = random.Random(f"groups/{size}")  # the same groups for each seed
        self._groups = [_text(texts, shared).encode() for _ in range(GROUPS)]
        self._fresh = size - shared
        self._snippets = [_text(self._random, 256).encode() for _ in range(_SNIPPETS)]
        self._seed = seed
        self._serial = 0
        options = {"stream": True} if stream else {}
        whole = {"model": model, "messages": [{"role": "user", "content": "@"}], "max_tokens": 16, **options}
        before, _, after = json.dumps(whole).partition("@")
        self._before, self._after = before.encode(), after.encode()

    def next(self) -> bytes:
        """The next body."""
        serial = self._serial
        self._serial += 1
        tail = b" %x %x" % (serial, self._seed)
        pieces = [tail, *self._random.choices(self._snippets, k=self._fresh // 256 + 1)]
        fresh = b" ".join(pieces)[: self._fresh]
        return b"".join((self._before, self._groups[serial % SLOTS % GROUPS], fresh, self._after))


def _text(source: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += " ".join(source.choices(WORDS, k=64)) + ". "
    return text[:length]
