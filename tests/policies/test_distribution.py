"""Counted bounds on who gets how much, and how much moves when the fleet changes.

Bounds are five standard deviations of independent draws, so that a right policy fails a wrong seed
about once in two million.
"""

import random
from collections import Counter

import pytest

from policies.routing import POLICIES, Ask, Candidate, build

DRAWS = 5_000


def fleet(number: int) -> list[Candidate]:
    return [Candidate(f"http://10.0.0.{place}:8000") for place in range(number)]


def key(number: int) -> Ask:
    return Ask(prompt_tokens=1_000, session=f"session-{number}")


def spread(share: float) -> float:
    return 5 * (DRAWS * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round-robin"}))
@pytest.mark.parametrize("number", [3, 16])
def test_even_over_equal_workers(name: str, number: int) -> None:
    policy = build({"name": name}, random.Random(7))
    took = Counter(policy.choose(key(draw), fleet(number)).worker for draw in range(DRAWS))
    assert all(abs(took[one.worker] - DRAWS / number) <= spread(1 / number) for one in fleet(number)), took


def test_round_robin_is_exactly_even() -> None:
    policy = build({"name": "round-robin"}, random.Random(7))
    took = Counter(policy.choose(key(draw), fleet(16)).worker for draw in range(1_600))
    assert set(took.values()) == {100}


def test_power_of_two_draws_every_pair_equally() -> None:
    # With loads 0 < 1 < 2 < 3 the lightest wins 3 of 6 pairs, then 2, 1 and 0.
    candidates = [Candidate(f"w{load}", queued_tokens=load + 1) for load in range(4)]
    policy = build({"name": "power-of-two"}, random.Random(7))
    took = Counter(policy.choose(key(draw), candidates).worker for draw in range(DRAWS))
    for load, share in enumerate((1 / 2, 1 / 3, 1 / 6, 0)):
        assert abs(took[f"w{load}"] - DRAWS * share) <= spread(share)


def placed(policy_seed: int, candidates: list[Candidate]) -> dict[int, str]:
    policy = build({"name": "consistent-hash"}, random.Random(policy_seed))
    return {number: policy.choose(key(number), candidates).worker for number in range(DRAWS)}


def test_consistent_hash_moves_only_the_keys_of_a_worker_that_left() -> None:
    before = placed(1, fleet(16))
    gone = fleet(16)[3]
    after = placed(2, [one for one in fleet(16) if one != gone])  # another process agrees
    assert all((before[number] == gone.worker) or before[number] == after[number] for number in before)
    orphans = Counter(after[number] for number in before if before[number] == gone.worker)
    assert len(orphans) == 15  # they are shared by all that stayed
    assert max(orphans.values()) <= 2 * orphans.total() / 15


def test_consistent_hash_gives_a_new_worker_only_keys_of_its_own() -> None:
    before, after = placed(1, fleet(15)), placed(1, fleet(16))
    moved = [number for number in before if before[number] != after[number]]
    assert {after[number] for number in moved} == {fleet(16)[15].worker}
    assert abs(len(moved) - DRAWS / 16) <= spread(1 / 16)


@pytest.mark.parametrize("bound", [1.0, 1.25, 2.0])
def test_consistent_hash_keeps_its_bound_under_one_hot_key(bound: float) -> None:
    policy = build({"name": "consistent-hash", "bound": bound}, random.Random(0))
    running: Counter[str] = Counter()
    rng = random.Random(1)
    for step in range(1_500):
        candidates = [Candidate(f"w{place}", running=running[f"w{place}"]) for place in range(8)]
        ask = key(0 if rng.random() < 0.8 else step)
        running[policy.choose(ask, candidates).worker] += 1
        assert max(running.values()) <= bound * running.total() / 8 + 1
        if running.total() > 64:
            running[rng.choice(list(running.elements()))] -= 1
