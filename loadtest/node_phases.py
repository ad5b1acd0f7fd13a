"""What the scenario ``node`` measures, one function a phase, on engines that already run.

Both sides of every ratio take turns, and who goes first changes from pair to pair. An engine is its base URL.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from loadtest.node_requests import Seen, ask, counter, prompt

Counter = Callable[[], Awaitable[float]]
"""Blocks or chunks that a node or a peer has made readable so far."""
Pair = tuple[float, float]
T = TypeVar("T")

POLL_S = 0.002
FIRST_LOADS = 2
"""An engine's first loads are slower, as its first requests are."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens. Documents end at a block of 32 and at LMCache's chunk of 64; the question after
    them is what even a full hit leaves to compute."""

    document: int = 2048
    question: int = 16
    storing: int = 1024
    long: int = 4992
    short: int = 480
    stored_s: float = 10.0
    """Patience with a store."""


class FirstReads(msgspec.Struct):
    """``ttft``: (with connector, without) of each prompt; ``readable``: seconds from the first token until
    all its records could be read; ``prompts`` are what was asked, oldest first."""

    ttft: list[Pair] = []
    readable: list[float] = []
    prompts: list[list[int]] = []


class Transfers(msgspec.Struct):
    """``loads``: (TTFT of a load, of a local hit) of each prompt; ``stores``: seconds from the writer's first
    token until all could be read."""

    loads: list[Pair] = []
    stores: list[float] = []


class Phases:
    """The phases. ``name`` and ``seed`` keep prompts of different scenarios apart."""

    def __init__(self, client: aiohttp.ClientSession, sizes: Sizes, seed: int) -> None:
        self._client = client
        self._sizes = sizes
        self._seed = seed

    def counter(self, url: str, name: str) -> Counter:
        """How often the process behind ``url`` has counted the metric ``name``."""
        return lambda: counter(self._client, url, name)

    async def warm_up(self, urls: Sequence[str], times: int = 3) -> None:
        """Lets each engine compile and allocate what only its first requests cost, hits among them."""
        for url in urls:
            for number in range(times):
                ids = self._text(f"warm {url} {number}", self._sizes.document)
                for _ in range(2):
                    await ask(self._client, url, ids, 8)

    async def first_reads(
        self, ours: str, plain: str, count: int, stored: Counter, blocks: int
    ) -> FirstReads:
        """New prompts to an engine with the connector and to one without. ``blocks``: how much ``stored``
        counts for one prompt."""
        found = FirstReads()
        for number in range(count):
            ids = self._text(f"first {number}", self._sizes.document)
            before = await stored()
            pair: dict[str, float] = {}
            for url in _in_turn([ours, plain], number):
                seen = await ask(self._client, url, ids)
                pair[url] = seen.ttft
                if url == ours:
                    found.readable.append(await self._readable(seen, stored, before + blocks))
            found.ttft.append((pair[ours], pair[plain]))
            found.prompts.append(ids)
        return found

    async def _readable(self, seen: Seen, stored: Counter, wanted: float) -> float:
        """Seconds after the first token when all was stored; infinite if it never was."""
        end = time.perf_counter() + self._sizes.stored_s
        while await stored() < wanted:
            if time.perf_counter() > end:
                return float("inf")
            await asyncio.sleep(POLL_S)
        return max(0.0, time.perf_counter() - seen.times[0])

    async def own_hits(self, ours: str, plain: str, prompts: Sequence[list[int]], pairs: int) -> list[Pair]:
        """Prompts that both engines hold themselves: TTFT with the connector, and without."""
        for ids in prompts:
            for url in (ours, plain):
                await ask(self._client, url, ids)
        return [
            await self._both(ours, plain, prompts[number % len(prompts)], number) for number in range(pairs)
        ]

    async def itl(self, ours: str, plain: str, pairs: int, *, lead: int = 4, after: int = 8) -> list[Pair]:
        """Mean time between the ``after`` tokens of a stream that follow another prompt's first token: while
        the connector stores that prompt, and in an engine without one."""
        found = []
        for number in range(pairs):
            pair: dict[str, float] = {}
            for url in _in_turn([ours, plain], number):
                pair[url] = await self._stream_beside(url, f"itl {number}", lead, after)
            found.append((pair[ours], pair[plain]))
        return found

    async def _stream_beside(self, url: str, name: str, lead: int, after: int) -> float:
        begun = asyncio.Event()
        ids = self._text(f"{name} stream", 2 * self._sizes.question)

        def look(count: int) -> None:
            if count >= lead:
                begun.set()

        running = asyncio.create_task(ask(self._client, url, ids, lead + after + 8, look))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        other = await ask(self._client, url, self._text(f"{name} storing", self._sizes.storing))
        stream = await running
        begin = next((i for i, at in enumerate(stream.times) if at >= other.times[0]), len(stream.times))
        window = stream.times[max(begin - 1, 0) : begin + after]
        if len(window) < after // 2:
            raise RuntimeError("the stream ended before the other prompt was computed")
        return (window[-1] - window[0]) / (len(window) - 1)

    async def other_engine(self, url: str, prompts: Sequence[list[int]]) -> list[Pair]:
        """TTFT of prompts that another engine computed, then of the same again as a local hit."""
        return [await self._twice(url, ids) for ids in prompts]

    async def once(self, url: str, prompts: Sequence[list[int]]) -> list[Seen]:
        """Each prompt once."""
        return [await ask(self._client, url, ids) for ids in prompts]

    async def transfers(
        self,
        writers: Sequence[str],
        readers: Sequence[str],
        stored: Sequence[tuple[Counter, int]],
        count: int,
    ) -> list[Transfers]:
        """For each of several systems: a prompt is computed by its writer, then asked of its reader twice.
        ``stored``: its counter, and how much that counts for one prompt. The first ``FIRST_LOADS`` are not
        counted."""
        found = [Transfers() for _ in writers]
        for number in range(count + FIRST_LOADS):
            ids = self._text(f"transfer {number}", self._sizes.document)
            for system in _in_turn(range(len(writers)), number):
                counter, much = stored[system]
                before = await counter()
                seen = await ask(self._client, writers[system], ids)
                found[system].stores.append(await self._readable(seen, counter, before + much))
                found[system].loads.append(await self._twice(readers[system], ids))
        return [Transfers(one.loads[FIRST_LOADS:], one.stores[FIRST_LOADS:]) for one in found]

    async def rereads(self, urls: Sequence[str], documents: int, passes: int) -> list[list[Pair]]:
        """Documents that do not fit an engine's KV, read in turn; for each engine the pairs (TTFT of a read,
        of the same again as a local hit) of all passes but the first."""
        texts = [self._text(f"long {number}", self._sizes.long) for number in range(documents)]
        found: list[list[Pair]] = [[] for _ in urls]
        for turn in range(passes + 1):
            for number, ids in enumerate(texts):
                for which in _in_turn(range(len(urls)), number + turn):
                    if turn == 0:
                        await ask(self._client, urls[which], ids)
                    else:
                        found[which].append(await self._twice(urls[which], ids))
        return found

    async def zipf(
        self, ours: str, plain: str, documents: int, reads: int, *, run: int, exponent: float = 1.1
    ) -> list[Pair]:
        """Reads of documents drawn by Zipf's law: TTFT with the connector, and without. The documents of
        each ``run`` are new."""
        rng = random.Random(f"zipf {self._seed} {run}")
        texts = [self._text(f"zipf {run} {number}", self._sizes.short) for number in range(documents)]
        weights = [1 / (rank + 1) ** exponent for rank in range(documents)]
        drawn = rng.choices(texts, weights, k=reads)
        return [await self._both(ours, plain, ids, number) for number, ids in enumerate(drawn)]

    async def _both(self, ours: str, plain: str, ids: list[int], number: int) -> Pair:
        pair: dict[str, float] = {}
        for url in _in_turn([ours, plain], number):
            pair[url] = (await ask(self._client, url, ids)).ttft
        return pair[ours], pair[plain]

    async def _twice(self, url: str, ids: list[int]) -> Pair:
        first = await ask(self._client, url, ids)
        return first.ttft, (await ask(self._client, url, ids)).ttft

    def _text(self, name: str, tokens: int) -> list[int]:
        return prompt(f"{self._seed} {name}", tokens + self._sizes.question)


def _in_turn(both: Sequence[T], number: int) -> Sequence[T]:
    return both if number % 2 == 0 else list(reversed(both))
