"""``hotprefix bench node``: a cache node without engines.

A real node process, driven through the client path of the connector. What it is worth to an engine, its peers
beside it, is measured with engines: ``hotprefix bench engines --scenario node``, which also holds
``node.store_vs_lmcache`` and ``node.load_vs_lmcache``, since those are throughputs that an engine sees.
"""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hotprefix.home import find_home
from hotprefix.local_node import LocalNode
from hotprefix.processes import RunFolder
from hotprefix.progress import say_error
from loadtest.node_link import Bytes, Link, NodeLink, Prompt, made_up, plain_layout
from loadtest.report import claim, report, show
from loadtest.resident import cpu_seconds, resident_beyond

MIB = 1 << 20
HIT_MIB = (1, 4, 16, 64)
"""Sizes of the hits. Each is a run of records of one MiB, stored one after the other into an empty arena."""
HIT_BLOCK = 128 * 1024
ARENA_MIB = 1024
LOOP_BLOCK = 4096
LOOP_MIB, LOOP_PROMPT_BLOCKS = 64, 32
LOOP_SET = 1.25
LOOP_WARM = 2
RECORDS, RECORD_BLOCKS, RECORD_BLOCK_BYTES = 100_000, 8, 512
"""A record of eight small blocks is one page of the arena."""

Clock = Callable[[], float]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hotprefix bench node", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--runs", type=int, default=15, help="pairs of a hit and a memcpy of each size")
    parser.add_argument("--passes", type=int, default=20, help="passes of the loop over the set")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long the idle node is watched")
    parser.add_argument("--records", type=int, default=RECORDS, help="records held meanwhile")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Entry of the command; returns 1 when a claim does not hold."""
    options = parse(arguments)
    return show(run(options), "a cache node", options.json)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark, each part with a node of its own."""
    with started(ARENA_MIB * MIB) as node:
        say_error("hits against memcpy …")
        rates = _hits(node, options.runs)
    with started(LOOP_MIB * MIB) as node:
        say_error("loop over a set larger than the memory …")
        link = NodeLink(node.socket, plain_layout(LOOP_BLOCK))
        prompts = loop_prompts(LOOP_MIB * MIB)
        loop = loop_hits(link, prompts, options.passes)
        link.close()
    memory = options.records * RECORD_BLOCKS * RECORD_BLOCK_BYTES + 16 * MIB
    with started(memory, records=options.records + 1000) as node:
        say_error(f"{options.records:,} records …")
        empty = resident_beyond(node.pid or 0, memory)
        link = NodeLink(node.socket, plain_layout(RECORD_BLOCK_BYTES))
        fill(link, options.records)
        held = resident_beyond(node.pid or 0, memory)
        say_error("idle …")
        share = idle_share(lambda: cpu_seconds(node.pid or 0), options.idle_s)
        link.close()
    claims = [
        claim("node.memory_vs_memcpy", min(one["hit_ratio"] for one in rates.values()), ">=", 0.8),
        claim("node.loop_hit_rate", loop["hit_rate"], ">=", 0.7),
        claim("node.overhead_mb", held / 1e6, "<=", 150),
        claim("node.idle_core_share", share, "<=", 0.005),
    ]
    figures: dict[str, Any] = {f"hit of {size} MiB": one for size, one in rates.items()}
    figures["detail"] = {
        "loop": loop,
        "overhead_mb": {"empty": empty / 1e6, "held": held / 1e6},
        "records": options.records,
    }
    return report(claims, figures, options.runs)


@contextmanager
def started(memory_bytes: int, records: int = 0) -> Iterator[LocalNode]:
    """A node of so many bytes and records (0: as many as it takes for such a memory), ended and removed
    afterwards."""
    folder = RunFolder()
    node = None
    try:
        config = {"memory": {"records": records}}
        logs = find_home().logs / "bench"
        node = LocalNode(folder, logs, memory_bytes=memory_bytes, config=config)
        node.wait_ready()
        yield node
    finally:
        if node is not None:
            node.stop()
        folder.remove()


# -- hits against memcpy ------------------------------------------------------------------------


def _hits(node: LocalNode, runs: int) -> dict[int, dict[str, float]]:
    """Most of the arena is filled with hits, so that one never finds its bytes in the processor's caches."""
    link = NodeLink(node.socket, plain_layout(HIT_BLOCK))
    blocks = MIB // HIT_BLOCK
    rates = {}
    for size in HIT_MIB:
        count = max(3, (ARENA_MIB // len(HIT_MIB) - 32) // size)
        prompts = [made_up(size * 1000 + number, size * blocks) for number in range(count)]
        rates[size] = hit_rate(link, prompts, size * MIB, runs)
    link.close()
    return rates


def hit_rate(
    link: Link, prompts: Sequence[Prompt], size: int, runs: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Bytes a second of hits and of memcpy, in turn over all ``prompts`` of ``size`` bytes; medians of runs.
    Both read from and write to equally many, touched, bytes."""
    source, target = _touched(len(prompts) * size), _touched(len(prompts) * size)
    for number, prompt in enumerate(prompts):
        if link.store(prompt, source=source[number * size :]) != prompt.blocks:
            raise RuntimeError("a prompt did not fit the node's memory")
        if link.load(prompt, target[number * size : (number + 1) * size]) != prompt.blocks:
            raise RuntimeError("a prompt that was just stored is not held")
    if not np.array_equal(source, target):
        raise RuntimeError("other bytes came back than were stored")
    taken: dict[str, list[float]] = {"memcpy": [], "hit": [], "hit_ahead": []}
    ways = list(taken)
    for run in range(runs):
        for way in ways[run % 3 :] + ways[: run % 3]:
            began = clock()
            if way == "memcpy":
                for number in range(len(prompts)):
                    part = slice(number * size, (number + 1) * size)
                    target[part] = source[part]
            else:
                read_all(link, prompts, target, ahead=int(way == "hit_ahead"))
            taken[way].append((clock() - began) / len(prompts))
    rows = {f"{way}_us": 1e6 * statistics.median(times) for way, times in taken.items()}
    for way in ("hit", "hit_ahead"):
        rows[f"{way}_ratio"] = statistics.median(
            copy / hit for copy, hit in zip(taken["memcpy"], taken[way], strict=True)
        )
    return {**rows, "hit_gb_s": size / statistics.median(taken["hit"]) / 1e9, "hits_a_run": len(prompts)}


def read_all(link: Link, prompts: Sequence[Prompt], target: Bytes, ahead: int) -> None:
    """Reads prompts of equal size one after the other; so many more are asked for before one is copied, as a
    scheduler does that is a step ahead of its workers. Raises RuntimeError when one is not held."""
    size = len(target) // len(prompts)
    asked: deque[int | None] = deque()
    for number in range(len(prompts) + ahead):
        if number < len(prompts):
            asked.append(link.ask(prompts[number]))
        if number >= ahead:
            at = number - ahead
            if link.read(asked.popleft(), target[at * size : (at + 1) * size]) != prompts[at].blocks:
                raise RuntimeError("a hit was lost")


def _touched(size: int) -> Bytes:
    """Memory that is really there, and not all alike."""
    return np.resize(np.arange(251, dtype=np.uint8), size)


# -- a loop over a set that does not fit --------------------------------------------------------


def loop_prompts(memory_bytes: int) -> list[Prompt]:
    """Prompts that together need 1.25 times the memory."""
    count = round(memory_bytes * LOOP_SET / (LOOP_PROMPT_BLOCKS * LOOP_BLOCK))
    return [made_up(number, LOOP_PROMPT_BLOCKS) for number in range(count)]


def loop_hits(link: Link, prompts: Sequence[Prompt], passes: int) -> dict[str, float]:
    """Reads all prompts in the same order again and again, storing what is missing, as an engine does. The
    hit rate is the share of blocks that were held, after two passes in which nothing or little can be."""
    held: list[int] = []
    for _ in range(passes):
        hits = 0
        for prompt in prompts:
            found = link.load(prompt)
            if found < prompt.blocks:
                link.store(prompt, found)
            hits += found
        held.append(hits)
    asked = sum(prompt.blocks for prompt in prompts)
    counted = held[min(LOOP_WARM, passes - 1) :]
    return {
        "hit_rate": sum(counted) / (asked * len(counted)),
        "hit_rate_all_passes": sum(held) / (asked * passes),
        "hit_rate_last_pass": held[-1] / asked,
        "prompts": len(prompts),
        "passes": passes,
    }


# -- overhead and rest --------------------------------------------------------------------------


def fill(link: Link, records: int, chain: int = 64) -> None:
    """Makes so many records, ``chain`` of them a prompt."""
    for number in range(-(-records // chain)):
        prompt = made_up(number, min(chain, records - number * chain) * RECORD_BLOCKS)
        if link.store(prompt) != prompt.blocks:
            raise RuntimeError(f"prompt {number} did not fit the node's memory")


def idle_share(
    cpu: Callable[[], float],
    seconds: float,
    clock: Clock = time.monotonic,
    rest: Callable[[float], None] = time.sleep,
) -> float:
    """Cores that a process uses while nothing is asked of it. ``rest`` waits so many seconds."""

    rest(1.0)
    began, used = clock(), cpu()
    rest(seconds)
    return (cpu() - used) / (clock() - began)
