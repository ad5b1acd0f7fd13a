"""Three workers; flip load, cache, health and trust, and say who must be chosen. Health is not a
policy's business: a worker that is down is not among the candidates."""

import random
from typing import Any

import pytest

from policies.routing import Ask, Candidate, build

ASK = Ask(prompt_tokens=1_000, session="s", prefix="p")


def pool(**changes: dict[str, Any] | None) -> list[Candidate]:
    """Workers a, b and c, idle and empty but for ``changes``; None: it is down."""
    return [
        Candidate(name, **(changes.get(name) or {}))
        for name in "abc"
        if name not in changes or changes[name] is not None
    ]


def chosen(spec: dict[str, object], candidates: list[Candidate], ask: Ask = ASK) -> set[str]:
    """Everyone that some seed chooses in the first place."""
    return {build(spec, random.Random(seed)).choose(ask, candidates).worker for seed in range(40)}


def holds(tokens: int, **more: Any) -> dict[str, Any]:
    return {"reach": {"gpu": tokens}, **more}


LEAST_LOADED = [
    (pool(), {"a", "b", "c"}),  # equals: any of them
    (pool(a={"queued_tokens": 1}), {"b", "c"}),
    (pool(a={"queued_tokens": 1}, b={"running": 1}), {"c"}),
    (pool(a={"queued_tokens": 5}, b={"running": 90}, c={"queued_tokens": 9}), {"b"}),  # tokens come first
    (pool(a={"running": 2}, b={"running": 1}, c=None), {"b"}),  # the idle one is down
    (pool(a=holds(1_000, running=1), b={"running": 2}), {"c"}),  # cache does not count
]


@pytest.mark.parametrize(("candidates", "expected"), LEAST_LOADED)
def test_least_loaded(candidates: list[Candidate], expected: set[str]) -> None:
    assert chosen({"name": "least-loaded"}, candidates) == expected


POWER_OF_TWO = [
    (pool(), {"a", "b", "c"}),
    (pool(a={"queued_tokens": 9}), {"b", "c"}),  # the heaviest loses each pair
    (pool(a={"queued_tokens": 9}, b={"queued_tokens": 5}), {"b", "c"}),  # b wins where c is not drawn
    (pool(a={"queued_tokens": 9}, b=None), {"c"}),  # two are left: plain least loaded
]


@pytest.mark.parametrize(("candidates", "expected"), POWER_OF_TWO)
def test_power_of_two(candidates: list[Candidate], expected: set[str]) -> None:
    assert chosen({"name": "power-of-two"}, candidates) == expected


@pytest.mark.parametrize("name", ["random", "round-robin"])
def test_blind_policies_see_neither_load_nor_cache(name: str) -> None:
    assert chosen({"name": name}, pool(a={"queued_tokens": 9_999}, b=holds(1_000))) == {"a", "b", "c"}


PREFIX = [
    (pool(a=holds(800)), {"a"}),  # the only holder
    (pool(a=holds(800), b=holds(816)), {"b"}),  # longest match
    (pool(a=holds(800), b=holds(800)), {"a", "b"}),  # equals: any of them
    (pool(a=holds(800), b=holds(800, running=1)), {"a"}),  # of equal holders the lighter
    (pool(a={"reach": {"disk": 900, "gpu": 100}}, b=holds(800)), {"a"}),  # its best tier counts
    (pool(), {"a", "b", "c"}),  # nobody holds anything: load alone
    (pool(a={"queued_tokens": 10}, b={"running": 1}), {"c"}),
    (pool(a=holds(800, queued_tokens=1_300)), {"a"}),  # waits 1300, saves 800, within the slack of 512
    (pool(a=holds(800, queued_tokens=1_400)), {"b", "c"}),  # waiting costs more than it saves
    (pool(a=holds(800, queued_tokens=1_400), b={"queued_tokens": 400}, c={"queued_tokens": 400}), {"a"}),
    (pool(a=holds(800, running=10)), {"a"}),  # 10 x 128 = 1280
    (pool(a=holds(800, running=11)), {"b", "c"}),  # tokens do not queue, but requests crowd
    (pool(a=holds(1_000, queued_tokens=2_000), b=holds(500)), {"b"}),  # the next best holder, not just anyone
    (pool(a=holds(1_000), b=holds(500), c=None), {"a"}),
    (pool(a=None, b=holds(500)), {"b"}),  # the longest holder is down
    (pool(a=holds(800, trust="suspect")), {"a", "b", "c"}),  # its events are not believed
    (pool(a=holds(800, trust="suspect", learned=400)), {"a"}),  # its history is
    (pool(a=holds(800, trust="suspect", learned=400), b=holds(416)), {"b"}),
    (pool(a=holds(800, trust="syncing")), {"a"}),  # what it has told so far is true
    (pool(a={"trust": "learned", "learned": 320}), {"a"}),  # an engine without events
    (pool(a={"trust": "exact", "learned": 320}), {"a", "b", "c"}),  # events say that it was evicted
]


@pytest.mark.parametrize(("candidates", "expected"), PREFIX)
def test_prefix(candidates: list[Candidate], expected: set[str]) -> None:
    assert chosen({"name": "prefix"}, candidates) == expected


PREFIX_PARAMETERS: list[tuple[dict[str, object], list[Candidate], set[str]]] = [
    ({"slack_tokens": 0}, pool(a=holds(800, queued_tokens=801)), {"b", "c"}),
    ({"slack_tokens": 0}, pool(a=holds(800, queued_tokens=800)), {"a"}),  # equal cost: it saves work
    ({"running_tokens": 0}, pool(a=holds(16, running=99)), {"a"}),
    ({"max_imbalance_tokens": 100}, pool(a=holds(800, queued_tokens=101)), {"b", "c"}),
    ({"max_imbalance_tokens": 100}, pool(a=holds(800, queued_tokens=100)), {"a"}),
    # The guard is per worker: the next holder is not passed over with the first.
    ({"max_imbalance_tokens": 100}, pool(a=holds(800, queued_tokens=101), b=holds(96)), {"b"}),
]


@pytest.mark.parametrize(("parameters", "candidates", "expected"), PREFIX_PARAMETERS)
def test_prefix_parameters(
    parameters: dict[str, object], candidates: list[Candidate], expected: set[str]
) -> None:
    assert chosen({"name": "prefix", **parameters}, candidates) == expected


LEARNED_PREFIX = [
    (pool(a=holds(800)), {"a", "b", "c"}),  # events are not looked at
    (pool(a=holds(800), b={"learned": 16}), {"b"}),
    (pool(a={"learned": 800, "queued_tokens": 1_400}), {"b", "c"}),  # the same guard
    (pool(a={"learned": 800, "trust": "suspect"}), {"a"}),  # history needs no trust
]


@pytest.mark.parametrize(("candidates", "expected"), LEARNED_PREFIX)
def test_learned_prefix(candidates: list[Candidate], expected: set[str]) -> None:
    assert chosen({"name": "learned-prefix"}, candidates) == expected


def test_a_session_stays_moves_when_its_worker_is_down_and_stays_there() -> None:
    policy = build({"name": "session"}, random.Random(0))
    home = policy.choose(ASK, pool()).worker
    loaded = pool(**{home: {"queued_tokens": 99_999, "running": 99}})
    assert policy.choose(ASK, loaded).worker == home  # whatever its load
    refuge = policy.choose(ASK, pool(**{home: None})).worker
    assert refuge != home
    assert policy.choose(ASK, pool()).worker == refuge  # its cache is there now
    light = pool(a={"running": 1}, b={"running": 1})
    assert policy.choose(Ask(1_000, session=""), light).worker == "c"  # without a session: load
    fresh = policy.choose(Ask(1_000, session="s", tenant="other"), light)
    assert (fresh.worker, fresh.why["rule"]) == ("c", "new")  # names are a tenant's own


def test_the_session_unused_longest_is_forgotten_first() -> None:
    policy = build({"name": "session", "max_sessions": 2}, random.Random(0))

    def rule(session: str) -> object:
        return policy.choose(Ask(1, session=session), pool()).why["rule"]

    assert [rule(one) for one in ("x", "y", "x", "z", "x", "y")] == [
        "new",
        "new",
        "home",
        "new",
        "home",
        "new",
    ]


def test_consistent_hash_stays_until_its_worker_is_full_or_down() -> None:
    policy = build({"name": "consistent-hash"}, random.Random(0))
    home = policy.choose(ASK, pool()).worker
    others = [name for name in "abc" if name != home]
    even: dict[str, Any] = {name: {"running": 4} for name in "abc"}
    assert policy.choose(ASK, pool(**even)).worker == home  # 13 requests, bound ceil(1.25 x 13 / 3) = 6
    assert policy.choose(ASK, pool(**{**even, home: {"running": 5}})).worker == home
    second = policy.choose(ASK, pool(**{**even, home: {"running": 7}})).worker
    assert second in others  # 16 requests, bound 7
    assert policy.choose(ASK, pool(**{home: None})).worker == second  # the same next one as when full
    assert (
        policy.choose(ASK, pool(**{home: holds(0), others[0]: holds(1_000)})).worker == home
    )  # blind to cache


def test_consistent_hash_takes_the_key_it_is_told() -> None:
    def places(key: str, asks: list[Ask]) -> int:
        policy = build({"name": "consistent-hash", "key": key}, random.Random(0))
        return len({policy.choose(ask, pool()).worker for ask in asks})

    sessions = [Ask(1, session=f"s{number}", prefix="p") for number in range(60)]
    prefixes = [Ask(1, session="s", prefix=f"p{number}") for number in range(60)]
    assert (places("auto", sessions), places("session", sessions), places("prefix", sessions)) == (3, 3, 1)
    assert (places("auto", prefixes), places("session", prefixes), places("prefix", prefixes)) == (1, 1, 3)
    assert places("auto", [Ask(1)] * 60) == 3  # nothing to hash: by load, equals by lot


def test_round_robin_skips_nobody_when_models_share_workers() -> None:
    policy = build({"name": "round-robin"}, random.Random(0))
    both, one = pool(), pool(c=None)
    turns = [policy.choose(ASK, both if number % 2 else one).worker for number in range(60)]
    # c can be had in 30 turns and gets no less than its third of them; a position in a shared list
    # would have given it none or all.
    assert 10 <= turns.count("c") <= 20
    assert min(turns.count("a"), turns.count("b")) >= 20
    assert not any(turns[place] == turns[place + 1] for place in range(59))
