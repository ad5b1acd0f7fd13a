"""The benchmarks of the node on small things: fakes instead of a node, simulated engines instead of real ones."""

import argparse
import math
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from cachenode.wire import Piece
from hotprefix.home import Home
from loadtest import bench_node
from loadtest.bench_node import fill, hit_rate, idle_share, loop_hits, loop_prompts
from loadtest.bench_node_engines import counts
from loadtest.harness import fleet
from loadtest.node_claims import LIMITS, Samples, claims, figures, lmcache_store_rate, load_s
from loadtest.node_link import Bytes, Prompt, joined, made_up
from loadtest.node_phases import Phases, Sizes
from loadtest.node_requests import prompt, session, total
from loadtest.peers import lmcache_command, lmcache_environment, lmcache_flags
from loadtest.resident import Mapping, beyond, cpu_seconds, mappings, resident_beyond
from loadtest.sim.config import SimConfig

SMALL = Sizes(document=64, question=8, storing=32, long=96, short=32, stored_s=0.01)


class FakeLink:
    """A node that keeps whole prompts, as many as fit, and forgets the oldest or the newest."""

    def __init__(self, prompts: int, newest: bool = False) -> None:
        self._held: OrderedDict[bytes, Bytes | None] = OrderedDict()
        self._room, self._newest = prompts, newest
        self.spoil = False
        self._asked: list[Prompt] = []
        self.most_asked = 0

    def match(self, prompt: Prompt) -> int:
        return prompt.blocks if prompt.keys in self._held else 0

    def store(self, prompt: Prompt, first: int = 0, source: Bytes | None = None) -> int:
        if len(self._held) == self._room:
            self._held.popitem(last=self._newest)
        self._held[prompt.keys] = None if source is None else source.copy()
        return prompt.blocks

    def load(self, prompt: Prompt, target: Bytes | None = None) -> int:
        if not self.match(prompt):
            return 0
        self._held.move_to_end(prompt.keys, last=not self._newest)
        kept = self._held[prompt.keys]
        if target is not None and kept is not None:
            target[:] = kept[: len(target)]
            target[0] ^= self.spoil
        return prompt.blocks

    def ask(self, prompt: Prompt) -> int | None:
        if not self.match(prompt):
            return None
        self._asked.append(prompt)
        self.most_asked = max(self.most_asked, len(self._asked))
        return len(self._asked)

    def read(self, ticket: int | None, target: Bytes | None = None) -> int:
        return 0 if ticket is None else self.load(self._asked.pop(0), target)


class Steps:
    """A counter that goes up by two each time it is looked at."""

    def __init__(self) -> None:
        self._seen = 0

    async def __call__(self) -> float:
        self._seen += 2
        return float(self._seen)


# -- prompts and pieces -------------------------------------------------------------------------


def test_made_up_prompts_repeat_and_never_meet() -> None:
    one, again, other = made_up(1, 4), made_up(1, 4), made_up(2, 4)
    assert one == again
    assert one.blocks == 4
    assert not {one.keys[i : i + 16] for i in range(0, 64, 16)} & {
        other.keys[i : i + 16] for i in range(0, 64, 16)
    }
    assert one.part(1, 3) == Prompt(one.keys[16:48], one.proofs[32:96])
    assert prompt("a", 5) == prompt("a", 5) != prompt("b", 5)


def test_records_that_touch_are_one_copy() -> None:
    def piece(*passages: tuple[int, int]) -> Piece:
        return Piece(0, 0, 0, 1, 0, 1, list(passages))

    assert joined([piece((0, 10)), piece((10, 5), (40, 5)), piece((45, 5))]) == [(0, 15), (40, 10)]
    assert joined([]) == []


# -- the node without engines -------------------------------------------------------------------


def test_a_loop_over_a_larger_set_tells_the_orders_of_eviction_apart() -> None:
    prompts = [made_up(number, 2) for number in range(10)]
    assert loop_hits(FakeLink(8), prompts, 6)["hit_rate"] == 0
    kept = loop_hits(FakeLink(8, newest=True), prompts, 6)
    assert kept["hit_rate"] >= 0.7
    assert kept["hit_rate_all_passes"] < kept["hit_rate"]
    needed = sum(one.blocks for one in loop_prompts(1 << 20)) * bench_node.LOOP_BLOCK
    assert needed == pytest.approx(1.25 * (1 << 20), rel=0.1)


def test_hits_are_compared_with_memcpy_in_turn() -> None:
    ticks = iter(range(1000))
    prompts = [made_up(number, 1) for number in range(3)]
    link = FakeLink(3)
    found = hit_rate(link, prompts, 1 << 10, 4, clock=lambda: float(next(ticks)))
    assert (found["hit_ratio"], found["hit_ahead_ratio"], found["hits_a_run"]) == (1.0, 1.0, 3)
    assert link.most_asked == 2


def test_bytes_that_differ_or_do_not_fit_end_the_benchmark() -> None:
    prompts = [made_up(number, 1) for number in range(3)]
    spoilt = FakeLink(3)
    spoilt.spoil = True
    with pytest.raises(RuntimeError, match="other bytes"):
        hit_rate(spoilt, prompts, 64, 1)
    short = FakeLink(2)
    with pytest.raises(RuntimeError, match="lost"):
        hit_rate(short, prompts, 64, 1)


def test_records_are_made_in_chains() -> None:
    stored: list[int] = []

    class Counting(FakeLink):
        def store(self, prompt: Prompt, first: int = 0, source: Bytes | None = None) -> int:
            stored.append(prompt.blocks)
            return prompt.blocks

    fill(Counting(9), 10, chain=4)
    assert stored == [32, 32, 16]


def test_the_share_of_a_core_at_rest() -> None:
    rested: list[float] = []
    times = iter([100.0, 110.0])
    used = iter([5.0, 5.02])
    share = idle_share(lambda: next(used), 10.0, clock=lambda: next(times), rest=rested.append)
    assert share == pytest.approx(0.002)
    assert rested == [1.0, 10.0]


# -- memory and time of a process ---------------------------------------------------------------

_SMAPS = """7f00-7f80 rw-s 00000000 00:01 99    /memfd:arena (deleted)
Size:               2048 kB
Rss:                1024 kB
7f80-7f90 r--s 00000000 00:01 98    /memfd:directory (deleted)
Size:                512 kB
Rss:                 256 kB
Pss:                 128 kB
8000-9000 r-xp 00000000 08:01 7     /usr/lib/libc.so.6
Size:                 64 kB
Rss:                  32 kB
VmFlags: rd ex mr mw me
9000-a000 rw-p 00000000 00:00 0
Size:                  4 kB
Rss:                   4 kB
"""


def test_the_arena_is_left_out_and_nothing_else() -> None:
    found = mappings(_SMAPS)
    assert found[0] == Mapping("/memfd:arena (deleted)", 2 << 20, 1 << 20)
    assert [one.name for one in found[2:]] == ["/usr/lib/libc.so.6", ""]
    assert beyond(found, 1 << 20) == (256 + 32 + 4) << 10


def test_a_living_process_is_measured() -> None:
    before = cpu_seconds(os.getpid())
    kept = np.ones(8 << 20, np.uint8)
    assert resident_beyond(os.getpid(), 1 << 40) > kept.nbytes
    assert sum(i * i for i in range(200_000)) > 0
    assert cpu_seconds(os.getpid()) > before


# -- claims -------------------------------------------------------------------------------------


def _all_samples(ratio: float) -> Samples:
    pairs = [(ratio, 1.0)] * 7
    return Samples(
        first_read=pairs,
        readable=[0.1, 0.2],
        own_hit=pairs,
        itl=pairs,
        other_engine=pairs,
        restart=pairs,
        zipf=[pairs, pairs],
        loads=[(1.1, 1.0)] * 5,
        peer_loads=[(1.2, 1.0)] * 5,
        stores=[0.02, 0.01],
        store_gb_s=3.0,
        peer_store_gb_s=1.5,
        reread=pairs,
        peer_reread=[(2 * ratio, 1.0)] * 7,
    )


def test_every_claim_is_reported_and_held_against_its_limit() -> None:
    found = claims(_all_samples(1.0))
    assert [one.name for one in found] == list(LIMITS)
    assert all(one.holds for one in found)
    values = {one.name: one.value for one in found}
    assert values["node.load_vs_lmcache"] == pytest.approx(2.0)
    assert values["node.store_vs_lmcache"] == 2.0
    assert values["engines.reread_vs_lmcache"] == 0.5
    assert values["engines.readable_s"] == 0.2
    worse = {one.name for one in claims(_all_samples(1.7)) if one.holds is False}
    assert worse == {name for name in LIMITS if name.startswith("engines.")} - {
        "engines.readable_s",
        "engines.reread_vs_lmcache",
    }


def test_what_could_not_be_measured_says_why() -> None:
    samples = Samples(loads=[(1.1, 1.0)], absent={"node.load_vs_lmcache": "LMCache cannot be set up here"})
    found = {one.name: one for one in claims(samples)}
    assert all(one.holds is None for one in found.values())
    assert found["node.load_vs_lmcache"].reason == "LMCache cannot be set up here"
    assert found["engines.own_hit"].reason == "its phase was left out"


def test_figures_show_both_sides_and_the_interval() -> None:
    samples = _all_samples(1.5)
    rows = figures(samples, document_bytes=47_000_000)
    assert rows["own_hit"] == {
        "ms": 1500,
        "against_ms": 1000,
        "ratio": 1.5,
        "ratio_low": 1.5,
        "ratio_high": 1.5,
        "pairs": 7,
    }
    assert rows["store"] == {"gb_s": 3.0, "ms": 15.0}
    assert rows["load"]["gb_s"] == pytest.approx(0.47)
    assert rows["zipf, run 2"]["mean_ratio"] == 1.5
    assert load_s([(1.0, 1.0)]) > 0
    assert figures(Samples(), 1) == {}


def test_the_peers_log_tells_its_stores() -> None:
    log = "Stored 64 tokens in 0.005 seconds\nx Stored 2048 tokens in 0.020 seconds y\nRetrieved 2048 tokens"
    assert lmcache_store_rate(log, 1000) == pytest.approx(2048 * 1000 / 0.020 / 1e9)
    assert lmcache_store_rate("", 1000) == 0


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a_total x\na_total{k="1"} 2.0\na_total{k="2"} 3\na_total_created 9\nb 1.5\n'
    assert (total(text, "a_total"), total(text, "b"), total(text, "c")) == (5.0, 1.5, 0.0)


# -- phases on simulated engines ----------------------------------------------------------------


async def test_phases_measure_pairs() -> None:
    config = SimConfig(model="smollm2", block_size=32, num_blocks=64, decode_rate=2000)
    async with fleet(2, config=config, events=False) as engines, session() as client:
        ours, plain = (engine.url for engine in engines)
        phases = Phases(client, SMALL, seed=3)
        await phases.warm_up([ours, plain], times=1)
        first = await phases.first_reads(ours, plain, 3, Steps(), 2)
        assert len(first.ttft) == len(first.prompts) == 3
        assert all(one >= 0 for one in first.readable)
        assert [len(ids) for ids in first.prompts] == [72] * 3
        assert len(await phases.own_hits(ours, plain, first.prompts, 5)) == 5
        assert all(one > 0 and other > 0 for one, other in await phases.itl(ours, plain, 2))
        assert len(await phases.other_engine(plain, first.prompts)) == 3
        assert [seen.cached for seen in await phases.once(plain, first.prompts)] == [64] * 3
        assert len(await phases.zipf(ours, plain, 4, 10, run=1)) == 10
        moved = await phases.transfers([ours, plain], [plain, ours], [(Steps(), 2), (Steps(), 4)], 2)
        assert [(len(one.loads), len(one.stores)) for one in moved] == [(2, 2), (2, 2)]
        rereads = await phases.rereads([ours, plain], 3, 2)
        assert [len(one) for one in rereads] == [6, 6]


async def test_a_store_that_never_comes_is_not_waited_for_long() -> None:
    config = SimConfig(model="smollm2", block_size=32)
    async with fleet(2, config=config, events=False) as engines, session() as client:
        ours, plain = (engine.url for engine in engines)

        async def nothing() -> float:
            return 0.0

        found = await Phases(client, SMALL, seed=4).first_reads(ours, plain, 1, nothing, 2)
        assert found.readable == [math.inf]


async def test_an_engine_that_refuses_ends_the_benchmark() -> None:
    async with fleet(1, config=SimConfig(model="another"), events=False) as engines, session() as client:
        with pytest.raises(RuntimeError, match="status"):
            await Phases(client, SMALL, seed=5).once(engines[0].url, [[1, 2, 3]])


# -- the peer -----------------------------------------------------------------------------------


def test_the_peer_is_started_with_shared_memory_and_a_chunk_of_64(tmp_path: Path) -> None:
    command = lmcache_command(tmp_path / "bin" / "python", 5, 6, "name", 2)
    assert command[0] == str(tmp_path / "bin" / "lmcache")
    assert " ".join(command).endswith(
        "--port 5 --http-port 6 --l1-size-gb 2 --chunk-size 64 --max-workers 2 "
        "--supported-transfer-mode auto --shm-name name --eviction-policy LRU"
    )
    assert '"lmcache.mp.port": 5' in lmcache_flags(5)[1]


def test_the_peers_pins_are_exact_and_name_no_machine(tmp_path: Path) -> None:
    environment = lmcache_environment(Home(tmp_path))
    assert environment.folder == tmp_path / "peers" / "lmcache"
    pins = [line for line in environment.pins.read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "/" not in line and "@" not in line for line in pins)
    assert "lmcache==0.5.6" in pins


def test_three_runs_make_forty_pairs() -> None:
    many = counts(3)
    assert min(many.first_reads, many.own_pairs, many.itl_pairs) >= 40
    assert counts(1).others >= 5


def test_the_commands_flags() -> None:
    options: argparse.Namespace = bench_node.parse(["--runs", "2", "--records", "100"])
    assert (options.runs, options.records, options.passes) == (2, 100, 20)
