"""What a node holds counts for the workers it serves: reach, prediction, choice, and what the admin sees."""

import random
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from cacheindex.events import Tier
from cacheindex.keys import Namespace, prompt_keys
from cacheindex.table import Slot, Table
from gateway import config
from gateway.prediction import PAUSE_S, Cause, Loads, Prediction, agreed, judge
from gateway.route import Plan, Query, Router
from gateway.tokens import Prompt
from gateway.workers import Served, Worker
from loadtest.harness import eventually, socket_folder
from policies.routing import Ask, Candidate, Choice, build
from policies.routing.base import Policy, Trust
from tests.cacheindex.node_fakes import NodePublisher

SECRET = b"s" * 32
TOKENS = list(range(1000, 1000 + 16 * 20))
KEYS = prompt_keys(Namespace("m").root(SECRET), TOKENS)
GPU: Tier = "gpu"
MEMORY: Tier = "memory"


class Status(msgspec.Struct):
    trust: Trust = "exact"
    block_size: int | None = 16


class Sources:
    """What the hub would say; ``reports`` are what it was told."""

    def __init__(self) -> None:
        self.statuses: dict[str, Status] = {}
        self.layouts: dict[tuple[str, str], frozenset[str]] = {}
        self.reports: list[tuple[str, bool]] = []

    def status(self, worker: str) -> Status | None:
        return self.statuses.get(worker)

    def serves(self, node: str, worker: str) -> frozenset[str]:
        return self.layouts.get((node, worker), frozenset())

    def report(self, worker: str, agreed: bool) -> None:
        self.reports.append((worker, agreed))


class Looking:
    """A policy that shows what it saw."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seen: dict[str, Candidate] = {}

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        self.seen = {one.worker: one for one in candidates}
        return self._policy.choose(ask, candidates)


class Rig:
    """Workers a and b beside node n, c beside none; nothing is held yet."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sources, self.table = Sources(), Table(1 << 22)
        self.sources.statuses = {name: Status() for name in "abc"}
        self.sources.layouts = {("n", "a"): frozenset({"one"}), ("n", "b"): frozenset({"two"})}
        self.policy = Looking(build({"name": "prefix"}, random.Random(0)))
        self.router = Router(
            self.policy,
            self.table,
            self.sources,
            learned_bytes=1 << 20,
            predicted_s=0.0,
            waiting_s=0.0,
            secret=SECRET,
            clock=lambda: self.now,
        )
        self.workers = [
            Worker(config.Worker(name=name, url=f"http://{name}", node=None if name == "c" else "n"))
            for name in "abc"
        ]
        for worker in self.workers:
            worker.served = Served(base="m", names={"m": ""}, entries=[])

    def holds(self, blocks: int, holder: str = "n", layout: str = "one", tier: Tier = MEMORY) -> None:
        """``holder`` has exactly so many blocks of the prompt there."""
        slot = Slot(holder, tier, layout if holder == "n" else "")
        self.table.clear(slot)
        self.table.store(slot, KEYS[:blocks])

    def plan(self, tokens: Sequence[int] = TOKENS, among: str = "abc") -> Plan:
        self.now += 1.0
        prompt = Prompt(tokens, "tokens", len(tokens))
        workers = [worker for worker in self.workers if worker.name in among]
        return self.router.plan(Query("m", [prompt]), workers)

    def prediction(self, among: str = "a") -> Prediction:
        prediction = self.plan(among=among).prediction
        assert prediction is not None
        return prediction

    def seen(self, worker: str) -> Candidate:
        self.plan()
        return self.policy.seen[worker]


@pytest.fixture
def rig() -> Rig:
    return Rig()


# ---- reach ----


def test_reach_counts_the_workers_own_node_and_layout_only(rig: Rig) -> None:
    rig.holds(10)
    rig.holds(3, "a", tier=GPU)
    assert rig.seen("a").reach == {"gpu": 48, "memory": 160}
    assert rig.seen("b").reach == {}
    assert rig.seen("c").reach == {}
    rig.holds(6, layout="two")
    assert rig.seen("b").reach == {"memory": 96}
    rig.sources.layouts["m", "a"] = frozenset({"one"})
    rig.sources.layouts["n", "a"] = frozenset()
    assert rig.seen("a").reach == {"gpu": 48}, "another node may say that it serves it"


def test_an_engines_own_slower_tier_and_the_node_are_not_added(rig: Rig) -> None:
    rig.holds(10)
    rig.holds(4, "a", tier=MEMORY)
    assert rig.seen("a").reach == {"memory": 160}


@pytest.mark.parametrize("trust", ["suspect", "learned"])
def test_a_node_counts_where_the_workers_events_do_not(rig: Rig, trust: Trust) -> None:
    rig.holds(10)
    rig.holds(15, "a", tier=GPU)
    rig.sources.statuses["a"] = Status(trust)
    assert rig.seen("a").matched == 160
    rig.sources.statuses["a"] = Status("exact")
    assert rig.seen("a").matched == 240
    del rig.sources.statuses["a"]
    assert rig.seen("a").matched == 160
    rig.sources.layouts.clear()
    assert rig.seen("a").matched == 0


def test_text_prompts_meet_no_node(rig: Rig) -> None:
    rig.holds(10)
    rig.router.plan(Query("m", [Prompt(TOKENS, "text", 80)]), rig.workers)
    assert rig.policy.seen["a"].reach == {}


# ---- prediction ----


def test_the_longer_of_both_is_predicted(rig: Rig) -> None:
    rig.holds(10)
    assert rig.prediction() == Prediction(160, 160, 16, local=0)
    rig.holds(3, "a", tier=GPU)
    assert rig.prediction() == Prediction(160, 160, 16, local=48)
    rig.holds(12, "a", tier=GPU)
    assert rig.prediction() == Prediction(192, 192, 16, local=192)
    rig.holds(20)
    assert rig.prediction().cached == 304, "the last token is always computed"
    rig.sources.statuses["a"] = Status(block_size=32)
    assert rig.prediction().cached == 288


def test_without_events_the_node_alone_is_predicted(rig: Rig) -> None:
    rig.sources.statuses.clear()
    assert rig.plan(among="a").prediction is None
    rig.table.store(Slot("n", MEMORY, "one", 64), KEYS[3::4])
    assert rig.prediction() == Prediction(256, 256, 64, local=0)


JUDGED: list[tuple[Prediction, int, bool, Cause, bool | None]] = [
    # what was predicted, what was reported, whether it was evicted; the cause, and what it says of the events
    (Prediction(160, 160, 16, local=0), 160, False, "match", None),
    (Prediction(160, 160, 16, local=160), 160, False, "match", True),
    (Prediction(160, 160, 16), 160, False, "match", True),
    (Prediction(160, 160, 16, local=48), 48, False, "unloaded", None),
    (Prediction(160, 160, 16, local=48), 100, False, "unloaded", None),
    (Prediction(160, 160, 16, local=48), 0, False, "over", False),
    (Prediction(160, 160, 16, local=48), 48, True, "evicted", None),
    (Prediction(160, 160, 16, local=160), 48, False, "over", False),
    (Prediction(160, 160, 16), 48, False, "over", False),
    (Prediction(48, 48, 16, local=48), 160, False, "loaded", None),
    (Prediction(48, 160, 16, local=48), 160, False, "pending", None),
    (Prediction(48, 48, 16), 160, False, "under", False),
]


@pytest.mark.parametrize(("prediction", "reported", "evicted", "cause", "says"), JUDGED)
def test_differences_that_the_node_explains_are_apart(
    prediction: Prediction, reported: int, evicted: bool, cause: Cause, says: bool | None
) -> None:
    assert judge(prediction, reported, evicted=evicted) == cause
    assert agreed(prediction, reported, cause) is says


def test_failed_loads_do_not_make_a_worker_suspect(rig: Rig) -> None:
    rig.holds(10)
    rig.holds(3, "a", tier=GPU)
    for _ in range(2):
        assert rig.router.finished(rig.plan(among="a"), 48) == "unloaded"
    assert rig.router.finished(rig.plan(among="a"), 160) == "match"
    assert rig.sources.reports == []
    rig.holds(3)
    assert rig.router.finished(rig.plan(among="a"), 48) == "match"
    assert rig.sources.reports == [("a", True)]


def test_what_left_the_node_after_the_choice_is_evicted(rig: Rig) -> None:
    rig.holds(10)
    plan = rig.plan(among="a")
    rig.table.remove(Slot("n", MEMORY, "one"), KEYS[4:5])
    assert rig.router.finished(plan, 64) == "evicted"


def test_loads_that_never_come_are_not_counted_on_for_a_while(rig: Rig) -> None:
    rig.holds(10)
    rig.holds(10, layout="two")
    for _ in range(3):
        assert rig.prediction("a").cached == 160
        rig.router.finished(rig.plan(among="a"), 0)
    assert rig.prediction("a").cached == 0
    assert rig.seen("a").reach == {}
    assert rig.prediction("b").cached == 160, "another worker's loads may well come"
    rig.now += PAUSE_S
    assert rig.prediction("a").cached == 160
    for _ in range(3):
        rig.router.finished(rig.plan(among="a"), 0)
    assert rig.prediction("a").cached == 0
    rig.router.forget("a")
    assert rig.prediction("a").cached == 160, "it was restarted"


def test_loads_that_matter_not_are_not_judged() -> None:
    loads = Loads(lambda: 0.0)
    for _ in range(9):
        loads.judged("a", Prediction(160, 160, 16, local=160), "unloaded")
        loads.judged("a", Prediction(160, 160, 16, local=0), "evicted")
    assert loads.count("a")


# ---- choice ----


def test_of_equals_the_one_that_has_it_at_hand_is_chosen(rig: Rig) -> None:
    rig.holds(20)
    rig.holds(20, layout="two")
    rig.holds(20, "b", tier=GPU)
    assert {rig.plan(among="ab").worker for _ in range(20)} == {"b"}


def test_a_node_is_better_than_nothing(rig: Rig) -> None:
    rig.holds(20)
    rig.holds(2, "c", tier=GPU)
    plan = rig.plan()
    assert (plan.worker, plan.matched) == ("a", 304)


# ---- the whole gateway ----


async def test_a_node_beside_simulated_engines(start: Any) -> None:
    context: zmq.Context[Any] = zmq.Context()
    prompt = list(range(97, 97 + 16 * 6))
    keys = prompt_keys(Namespace("sim").root(b""), prompt)
    with socket_folder() as folder:
        ends = {"endpoint": f"ipc://{folder}/ev", "replay": f"ipc://{folder}/re"}
        node = NodePublisher(context, ends["endpoint"], ends["replay"], "n0")
        try:
            async with start(2, node="n0", nodes=[{"name": "n0", "events": ends}]) as stack:
                hub = stack.gateway.hub
                await eventually(lambda: hub.node("n0").trust == "exact")
                node.model.serves = [("w1", "one")]
                node.say(node.model.store(keys))
                node.say(node.model.beat())
                await eventually(lambda: hub.serves("n0", "w1"))
                body = {"model": "sim", "prompt": prompt, "max_tokens": 2}
                answer = await stack.client.post("/v1/completions", json=body)
                assert answer.headers["x-hotprefix-worker"] == "w1"
                assert answer.headers["x-hotprefix-matched-tokens"] == str(16 * 5)
                # The simulated engine has no connector: it computes, and nobody is to blame.
                assert await stack.metric("hotprefix_predictions_total", cause="unloaded") == 1
                assert hub.status("w1").trust == "exact"
                await _seen_by_operators(stack)
        finally:
            node.close()
            context.destroy(linger=0)


async def _seen_by_operators(stack: Any) -> None:
    async with httpx.AsyncClient(base_url=stack.admin_url, trust_env=False) as admin:
        (node,) = (await admin.get("/v1/nodes")).json()["nodes"]
        assert (node["name"], node["trust"], node["serves"]) == ("n0", "exact", {"w1": ["one"]})
        assert (node["epoch"], node["fill"], node["keys"]) == ("life 1", {"memory": 100}, 6)
        workers = (await admin.get("/v1/workers")).json()["workers"]
        assert [worker["node"] for worker in workers] == [
            {"name": "n0", "trust": "exact", "layouts": []},
            {"name": "n0", "trust": "exact", "layouts": ["one"]},
        ]
        text = (await admin.get("/metrics")).text
    for line in (
        'hotprefix_node_source_trust{node="n0",trust="exact"} 1.0',
        'hotprefix_node_source_keys{node="n0"} 6.0',
        'hotprefix_node_source_used_bytes{node="n0",tier="memory"} 100.0',
        'hotprefix_node_source_snapshots_total{node="n0"} 1.0',
    ):
        assert line in text
