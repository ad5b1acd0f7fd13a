"""How a simulated engine spends time: waiting, prefill one prompt after the other, decode."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from loadtest.sim.cache import Allocation, BlockCache, Space
from loadtest.sim.clock import Clock
from loadtest.sim.tokens import Tokenizer

_WORDS = """
    the river keeps its own slow time and every stone in it learns the same song while light falls over
    open water birds turn south again people carry bread home children count boats rain comes late
""".split()  # noqa: SIM905 (words read better than a list of them)


class Plan(NamedTuple):
    """An answer decided before it is given: its tokens (eos included) and how it ends."""

    tokens: list[int]
    finish: str


def plan_answer(
    prompt: list[int],
    tokenizer: Tokenizer,
    *,
    natural: int,
    max_tokens: int | None,
    room: int,
    seed: str,
    ignore_eos: bool = False,
    min_tokens: int = 0,
) -> Plan:
    """The same prompt and seed always get the same answer: plain English words.

    ``natural`` tokens unless ``max_tokens`` or ``room`` (context left) is less, or ``ignore_eos``
    or ``min_tokens`` ask for more. A natural end costs one more token, the eos.
    """
    limit = room if max_tokens is None else min(max_tokens, room)
    wanted = limit if ignore_eos else min(limit, max(natural, min_tokens))
    if wanted <= 0:
        return Plan([], "length")
    state = hashlib.sha256(f"{seed}:{prompt}".encode())
    tokens: list[int] = []
    counter = 0
    while len(tokens) < wanted:
        digest = hashlib.sha256(state.digest() + counter.to_bytes(4, "big")).digest()
        counter += 1
        text = "".join(" " + _WORDS[byte % len(_WORDS)] for byte in digest)
        tokens += tokenizer.encode(text, special=False)
    tokens = tokens[:wanted]
    if ignore_eos or wanted >= limit or tokenizer.eos is None:
        return Plan(tokens, "length" if ignore_eos or wanted >= limit else "stop")
    return Plan([*tokens, tokenizer.eos], "stop")


class Counters:
    """What ``/metrics`` shows. Counts only grow, gauges follow."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.queries = 0  # prompt tokens looked up
        self.hits = 0  # of these, found cached
        self.prompt_tokens = 0
        self.generated = 0
        self.finished = 0
        self.aborted = 0


class Queue:
    """Admits sequences first come, first served: ``max_num_seqs`` at a time, prefills one by one.

    ``publish`` is called after each step that may have changed the cache.
    """

    def __init__(
        self,
        cache: BlockCache,
        clock: Clock,
        publish: Callable[[], None],
        *,
        max_num_seqs: int,
        prefill_rate: float,
        decode_rate: float,
    ) -> None:
        self.counters = Counters()
        self._cache = cache
        self._clock = clock
        self._publish = publish
        self._max = max_num_seqs
        self._prefill_rate = prefill_rate
        self._decode_s = 0.0 if math.isinf(decode_rate) else 1.0 / decode_rate
        self._turn = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def run(self, prompt: list[int], space: Space, output: int) -> AsyncIterator[Allocation]:
        """Wait for a place, compute the prompt, and hold its blocks while the body decodes.
        Raises ``cache.TooLarge`` when the pool can never hold it."""
        held = await self._admit(prompt, space, output)
        try:
            yield held
        except BaseException:  # cancelled or cut: counted, and passed on
            self.counters.aborted += 1
            raise
        else:
            self.counters.finished += 1
        finally:
            self._release(held)

    async def decode(self, held: Allocation, token: int) -> None:
        """One output token."""
        await self._clock.sleep(self._decode_s)
        self._cache.append(held, token)
        self.counters.generated += 1
        self._publish()

    def flush(self) -> None:
        """Publish what changed in the cache outside of a request."""
        self._publish()

    async def _admit(self, prompt: list[int], space: Space, output: int) -> Allocation:
        counters = self.counters
        counters.waiting += 1
        admitted: Allocation | None = None
        try:
            async with self._turn:
                while (admitted := self._open(prompt, space, output)) is None:
                    self._freed.clear()
                    await self._freed.wait()
                await self._compute(admitted)
                return admitted
        except BaseException:  # cancelled, or too large: what was taken goes back
            if admitted is None:
                counters.waiting -= 1
            else:
                self._release(admitted)
            counters.aborted += 1
            raise

    def _open(self, prompt: list[int], space: Space, output: int) -> Allocation | None:
        if self.counters.running >= self._max:
            return None
        held = self._cache.open(prompt, space, output)
        if held is not None:
            self.counters.waiting -= 1
            self.counters.running += 1
        return held

    async def _compute(self, held: Allocation) -> None:
        counters = self.counters
        counters.queries += len(held.tokens)
        counters.hits += held.cached_tokens
        counters.prompt_tokens += len(held.tokens)
        if not math.isinf(self._prefill_rate):
            await self._clock.sleep((len(held.tokens) - held.cached_tokens) / self._prefill_rate)
        self._cache.computed_prompt(held)
        self._publish()

    def _release(self, held: Allocation) -> None:
        self.counters.running -= 1
        self._cache.free(held)
        self._publish()
        self._freed.set()
