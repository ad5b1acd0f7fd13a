"""``hotprefix bench engines --scenario node``: what the cache node is worth to real engines.

Three groups of engines, one after the other, all of one model: with the node and without; beside LMCache with
its shared memory transport, the same memory and its best chunk size, on caches that do not hold all; and with
caches that hold most. Requests are sent one at a time, so that only one engine computes; all of them have the
same core. Prompts are token ids drawn at random.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from hotprefix.engine_env import ensure_engine
from hotprefix.engines import Engine, EngineSpec, Fleet, allowed_cores, dtype_here
from hotprefix.errors import CommandError
from hotprefix.home import Home, find_home
from hotprefix.local_node import LocalNode
from hotprefix.model import DEFAULT_MODEL, ensure_model
from hotprefix.progress import say_error
from loadtest.node_claims import Samples, claims, figures, lmcache_store_rate
from loadtest.node_phases import FIRST_LOADS, Phases, Sizes
from loadtest.node_requests import session
from loadtest.peers import LMCACHE_CHUNK, LMCacheServer, ensure_lmcache
from loadtest.report import report

BLOCK = 32
BYTES_PER_TOKEN = {"auto": 23_040, "float32": 46_080}
"""KV of SmolLM2-135M: 30 layers, keys and values, 3 heads of 64."""
MEMORY_GIB = 2
LONG_BLOCKS, LONG_LENGTH = 640, 6144
"""20,480 tokens: four of the ten long documents."""
ZIPF_BLOCKS = 240
"""Four fifths of the twenty short documents."""
NODE_STORED = "hotprefix_node_stored_blocks_total"
LMCACHE_STORED = "lmcache_mp_l1_write_chunks_total"
PARTS = ("alone", "lmcache", "zipf")


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How often each thing is measured, for so many runs."""

    first_reads: int
    own_pairs: int
    itl_pairs: int
    others: int
    transfers: int
    documents: int
    passes: int
    zipf_documents: int
    zipf_reads: int
    zipf_runs: int


def counts(runs: int) -> Counts:
    """Three runs make the 40 pairs that a limit of 2 % needs, in about twenty minutes."""
    return Counts(
        first_reads=14 * runs,
        own_pairs=40 * runs,
        itl_pairs=14 * runs,
        others=max(5, 5 * runs),
        transfers=max(5, 5 * runs),
        documents=10,
        passes=runs,
        zipf_documents=20,
        zipf_reads=120,
        zipf_runs=runs,
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every group that ``options.parts`` names. What a peer that cannot be had would have shown is reported
    as not measured."""
    home = find_home()
    ensure_engine(home, say_error)
    bench = _Bench(home, str(ensure_model(home, DEFAULT_MODEL, say_error)), options.runs, options.seed)
    samples = Samples()
    groups: dict[str, Callable[[Samples], None]] = {
        "alone": bench.alone,
        "lmcache": bench.beside_lmcache,
        "zipf": bench.zipf,
    }
    for part in options.parts:
        began = time.monotonic()
        groups[part](samples)
        say_error(f"part {part}: {time.monotonic() - began:.0f} s")
    shown = {"sizes": bench.facts(), **figures(samples, bench.document_bytes)}
    return report(claims(samples), shown, options.runs)


class _Bench:
    """The groups of engines and what is asked of them."""

    def __init__(self, home: Home, model: str, runs: int, seed: int) -> None:
        self.sizes = Sizes()
        self.counts = counts(runs)
        self.dtype = dtype_here()
        self.bytes_per_token = BYTES_PER_TOKEN[self.dtype]
        self._home, self._model, self._seed = home, model, seed
        self._logs = home.logs / "bench-node"
        # The last core is the measured engines'; servers, nodes and this process live on the others.
        self._core = allowed_cores()[-1]

    @property
    def document_bytes(self) -> int:
        """KV of a document."""
        return self.sizes.document * self.bytes_per_token

    def facts(self) -> dict[str, Any]:
        """Sizes and counts, for the reader."""
        own = {"dtype": self.dtype, "kv_bytes_per_token": self.bytes_per_token, "node_gib": MEMORY_GIB}
        return {**own, **msgspec.to_builtins(self.sizes), **msgspec.to_builtins(self.counts)}

    def alone(self, samples: Samples) -> None:
        """Two engines with the node and one without."""
        with self._group() as (fleet, node):
            ours = self._engine(fleet, "node-a", node=node.socket)
            other = self._engine(fleet, "node-b", node=node.socket)
            plain = self._engine(fleet, "plain")
            fleet.wait_healthy(say=say_error)
            self._ask(lambda phases: self._alone(phases, samples, node, [ours, other, plain]))

    async def _alone(
        self,
        phases: Phases,
        samples: Samples,
        node: LocalNode,
        engines: Sequence[Engine],
    ) -> None:
        ours, other, plain = (engine.url for engine in engines)
        many = self.counts
        await phases.warm_up([ours, other, plain])
        say_error("first reads …")
        stored = phases.counter(node.url, NODE_STORED)
        blocks = self.sizes.document // BLOCK
        first = await phases.first_reads(ours, plain, many.first_reads, stored, blocks)
        samples.first_read, samples.readable = first.ttft, first.readable
        say_error("hits in the engines' own caches …")
        samples.own_hit = await phases.own_hits(ours, plain, first.prompts[-10:], many.own_pairs)
        say_error("a stream beside first reads …")
        samples.itl = await phases.itl(ours, plain, many.itl_pairs)
        say_error("the other engine …")
        known, spare = first.prompts[-many.others :], first.prompts[-many.others - FIRST_LOADS : -many.others]
        await phases.once(other, spare)
        samples.other_engine = await phases.other_engine(other, known)
        say_error("a restart …")
        before = [hit for _, hit in samples.other_engine]
        engines[1].restart()
        await asyncio.to_thread(engines[1].wait_healthy)
        await phases.warm_up([other])
        await phases.once(other, spare)
        after = await phases.once(other, known)
        samples.restart = [(seen.ttft, was) for seen, was in zip(after, before, strict=True)]

    def beside_lmcache(self, samples: Samples) -> None:
        """Two engines with the node and two with LMCache, with caches that hold four of ten documents."""
        try:
            python = ensure_lmcache(self._home, say_error)
        except CommandError as error:
            for name in ("node.store_vs_lmcache", "node.load_vs_lmcache", "engines.reread_vs_lmcache"):
                samples.absent[name] = f"LMCache cannot be set up here: {error}"
            python = None
        with self._group() as (fleet, node):
            log = self._logs / "lmcache.log"
            peer = None if python is None else LMCacheServer(python, fleet.folder, log, gib=MEMORY_GIB)
            try:
                cut: dict[str, Any] = {"blocks": LONG_BLOCKS, "max_model_len": LONG_LENGTH}
                engines = [self._engine(fleet, f"node-{n}", node=node.socket, **cut) for n in "cd"]
                if peer is not None:
                    peer.wait_ready()
                    cut |= {"python": str(python), "extra": peer.engine_flags}
                    engines += [self._engine(fleet, f"lmcache-{n}", **cut) for n in "cd"]
                fleet.wait_healthy(say=say_error)
                urls = [engine.url for engine in engines]
                self._ask(lambda phases: self._beside(phases, samples, node, peer, urls))
                samples.store_gb_s = self.document_bytes / statistics.median(samples.stores) / 1e9
                if peer is not None:
                    samples.peer_store_gb_s = lmcache_store_rate(log.read_text(), self.bytes_per_token)
            finally:
                if peer is not None:
                    fleet.stop_engines()
                    peer.stop()

    async def _beside(
        self,
        phases: Phases,
        samples: Samples,
        node: LocalNode,
        peer: LMCacheServer | None,
        urls: Sequence[str],
    ) -> None:
        many = self.counts
        await phases.warm_up(urls)
        writers, readers = urls[0::2], urls[1::2]
        size = self.sizes.document
        stored = [(phases.counter(node.url, NODE_STORED), size // BLOCK)]
        if peer is not None:
            stored.append((phases.counter(peer.url, LMCACHE_STORED), size // LMCACHE_CHUNK))
        say_error("stores and loads …")
        moved = await phases.transfers(writers, readers, stored, many.transfers)
        say_error("documents that do not fit …")
        rereads = await phases.rereads(writers, many.documents, many.passes)
        samples.loads, samples.stores, samples.reread = moved[0].loads, moved[0].stores, rereads[0]
        if peer is not None:
            samples.peer_loads, samples.peer_reread = moved[1].loads, rereads[1]

    def zipf(self, samples: Samples) -> None:
        """An engine with the node and one without, whose caches hold most of the documents."""
        with self._group() as (fleet, node):
            ours = self._engine(fleet, "node-z", node=node.socket, blocks=ZIPF_BLOCKS)
            plain = self._engine(fleet, "plain-z", blocks=ZIPF_BLOCKS)
            fleet.wait_healthy(say=say_error)

            async def read(phases: Phases) -> None:
                await phases.warm_up([ours.url, plain.url])
                many = self.counts
                for number in range(many.zipf_runs):
                    samples.zipf.append(
                        await phases.zipf(
                            ours.url, plain.url, many.zipf_documents, many.zipf_reads, run=number
                        )
                    )

            self._ask(read)

    @contextmanager
    def _group(self) -> Iterator[tuple[Fleet, LocalNode]]:
        """Engines to be, and a node of their own."""
        with Fleet(self._home, self._logs) as fleet:
            node = LocalNode(fleet.folder, self._logs, memory_bytes=MEMORY_GIB << 30)
            try:
                node.wait_ready()
                yield fleet, node
            finally:
                fleet.stop_engines()
                node.stop()

    def _engine(self, fleet: Fleet, name: str, **fields: Any) -> Engine:
        spec = EngineSpec(name=name, model=self._model, cores=(self._core,), block_size=BLOCK, events=False)
        return fleet.start_engine(msgspec.structs.replace(spec, **fields))

    def _ask(self, phase: Callable[[Phases], Awaitable[None]]) -> None:
        async def ask() -> None:
            async with session() as client:
                await phase(Phases(client, self.sizes, self._seed))

        asyncio.run(ask())
