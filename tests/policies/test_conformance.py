"""What every policy in the table must keep, whatever it is good at."""

import copy
import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing import POLICIES, Ask, Candidate, Policy, build

EVERY = pytest.mark.parametrize("name", POLICIES)

tokens = st.integers(0, 5_000)
candidates_lists = st.lists(
    st.builds(
        Candidate,
        worker=st.sampled_from([f"w{number}" for number in range(6)]),
        trust=st.sampled_from(["exact", "syncing", "suspect", "learned"]),
        queued_tokens=tokens,
        running=st.integers(0, 40),
        reach=st.dictionaries(st.sampled_from(["gpu", "memory", "disk"]), tokens, max_size=3),
        learned=tokens,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.worker,
)
asks = st.builds(
    Ask,
    prompt_tokens=tokens,
    session=st.sampled_from(["", "s1", "s2", "\ud800"]),
    tenant=st.sampled_from(["", "t1", "t2"]),
    prefix=st.sampled_from(["", "p1", "p2"]),
)
histories = st.lists(st.tuples(asks, candidates_lists), min_size=1, max_size=12)


def made(name: str, seed: int = 0) -> Policy:
    return build({"name": name}, random.Random(seed))


def replay(policy: Policy, history: Sequence[tuple[Ask, Sequence[Candidate]]]) -> list[object]:
    return [policy.choose(ask, candidates) for ask, candidates in history]


def idle(number: int) -> list[Candidate]:
    return [Candidate(f"w{place}") for place in range(number)]


def distinct(number: int) -> Ask:
    return Ask(prompt_tokens=100, session=f"s{number}", prefix=f"p{number}")


@EVERY
@settings(max_examples=15, deadline=None)
@given(history=histories, seed=st.integers(0, 3))
def test_equal_histories_give_equal_choices_in_whatever_order_candidates_come(
    name: str, history: list[tuple[Ask, list[Candidate]]], seed: int
) -> None:
    turned = [(ask, candidates[::-1]) for ask, candidates in history]
    assert replay(made(name, seed), history) == replay(made(name, seed), turned)


@EVERY
@settings(max_examples=15, deadline=None)
@given(history=histories)
def test_chooses_one_of_the_candidates_changes_none_and_says_why_in_few_words(
    name: str, history: list[tuple[Ask, list[Candidate]]]
) -> None:
    policy = made(name)
    for ask, candidates in history:
        before = copy.deepcopy(candidates)
        choice = policy.choose(ask, candidates)
        assert choice.worker in {candidate.worker for candidate in candidates}
        assert candidates == before
        assert 0 < len(choice.why) <= 6
        for term, value in choice.why.items():
            assert len(term) <= 20
            if isinstance(value, str):
                assert len(value) <= 128
            else:
                assert math.isfinite(value)


@EVERY
@settings(max_examples=15, deadline=None)
@given(history=histories, reach=tokens)
def test_what_the_index_says_of_an_untrusted_worker_changes_nothing(
    name: str, history: list[tuple[Ask, list[Candidate]]], reach: int
) -> None:
    def otherwise(one: Candidate) -> Candidate:
        if one.trust in ("exact", "syncing"):
            return one
        return Candidate(one.worker, one.trust, one.queued_tokens, one.running, {"gpu": reach}, one.learned)

    changed = [(ask, [otherwise(one) for one in candidates]) for ask, candidates in history]
    assert replay(made(name), history) == replay(made(name), changed)


@EVERY
def test_a_single_candidate_is_chosen_however_loaded(name: str) -> None:
    only = [Candidate("w0", queued_tokens=10**9, running=10**6)]
    policy = made(name)
    assert {policy.choose(distinct(number), only).worker for number in range(2_000)} == {"w0"}


@EVERY
def test_no_healthy_worker_starves_under_even_load(name: str) -> None:
    policy = made(name)
    took = Counter(policy.choose(distinct(number), idle(4)).worker for number in range(1_000))
    # Chance alone gives 250 each, with a standard deviation of 14 for independent draws.
    assert all(took[f"w{place}"] >= 180 for place in range(4)), took


@EVERY
@pytest.mark.parametrize("number", [2, 3, 8])
def test_a_worker_that_always_reads_empty_does_not_take_everything(name: str, number: int) -> None:
    # New, or failing each request at once: its load reads 0 whenever the policy looks. The others are
    # busy, but not beyond consistent-hash's bound, which would make them no choice at all.
    busy = [Candidate(f"w{place}", queued_tokens=5_000, running=1) for place in range(1, number)]
    policy = made(name)
    took = Counter(policy.choose(distinct(one), [Candidate("w0"), *busy]).worker for one in range(4_000))
    # Three even shares, or among few workers all but a quarter of one.
    assert took["w0"] <= 1.02 * min(3 / number, 1 - 1 / (4 * number)) * took.total(), took
    assert len(took) == number


@EVERY
def test_a_worker_that_left_is_not_missed_and_one_that_came_is_used(name: str) -> None:
    policy = made(name)
    for number in range(100):
        policy.choose(distinct(number), idle(3))
    assert {policy.choose(distinct(number), idle(2)).worker for number in range(100)} <= {"w0", "w1"}
    assert "w3" in {policy.choose(distinct(number + 100), idle(4)).worker for number in range(200)}


def items(thing: object) -> int:
    """How many things a policy keeps, in all its containers."""
    if isinstance(thing, Mapping):
        return len(thing) + sum(items(value) for value in thing.values())
    if isinstance(thing, list | deque | set | tuple):
        return len(thing) + sum(items(value) for value in thing)
    if type(thing).__module__.startswith("policies."):
        return items(getattr(thing, "__dict__", {}))
    return 0


@EVERY
def test_what_is_remembered_is_bounded(name: str) -> None:
    policy = made(name)
    for number in range(105_000 if name == "session" else 70_000):
        ask = Ask(prompt_tokens=200, session=f"s{number}", tenant=f"t{number}", prefix=f"p{number}")
        # Names change too: a fleet that scales up and down for months.
        holder = Candidate(f"w{number // 10}", reach={"gpu": 100}, learned=100)
        policy.choose(ask, [holder, Candidate("w")])
    assert items(policy) <= 105_000
