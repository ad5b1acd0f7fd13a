"""Every eviction policy keeps the contract of ``policies.eviction.base``, and each does what it is for."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import eviction
from policies.eviction import EVICTIONS, BadPolicy, Eviction, Item, lirs

CAPACITY = 1000
everyone = pytest.mark.parametrize("name", EVICTIONS)


def nobody(_record: int) -> bool:
    return False


def item(record: int, parent: int = -1, size: int = 10, first: int = 0, name: bytes = b"") -> Item:
    return Item(record, name or record.to_bytes(16, "little"), parent, size, first, 256)


def fill(policy: Eviction, chains: int, length: int) -> None:
    for chain in range(chains):
        for depth in range(length):
            number = chain * length + depth
            policy.add(item(number, number - 1 if depth else -1, first=256 * depth))


def evict(policy: Eviction, count: int, held: Callable[[int], bool] = nobody) -> list[int]:
    gone: list[int] = []
    for record in policy.victims(held):
        policy.remove(record)
        gone.append(record)
        if len(gone) == count:
            break
    return gone


@everyone
def test_leaves_go_before_roots_and_everything_goes(name: str) -> None:
    policy = eviction.build({"name": name}, CAPACITY)
    fill(policy, chains=7, length=5)
    gone = evict(policy, 100)
    assert sorted(gone) == list(range(35))
    for chain in range(7):
        mine = [record for record in gone if record // 5 == chain]
        assert mine == sorted(mine, reverse=True)


@everyone
def test_what_is_held_stays_and_so_do_its_ancestors(name: str) -> None:
    policy = eviction.build({"name": name}, CAPACITY)
    fill(policy, chains=3, length=4)
    gone = evict(policy, 100, held=lambda record: record == 6)
    assert sorted(gone) == [0, 1, 2, 3, 7, 8, 9, 10, 11]
    assert sorted(evict(policy, 100)) == [4, 5, 6]


@everyone
def test_named_victims_need_not_be_taken(name: str) -> None:
    policy = eviction.build({"name": name}, CAPACITY)
    fill(policy, chains=2, length=2)
    assert sorted(policy.victims(nobody)) == [1, 3]
    assert sorted(evict(policy, 9)) == [0, 1, 2, 3]


@everyone
def test_children_of_a_removed_record_are_roots(name: str) -> None:
    policy = eviction.build({"name": name}, CAPACITY)
    fill(policy, chains=1, length=3)
    policy.remove(1)
    policy.check_integrity()
    assert set(evict(policy, 9)) == {0, 2}


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove", "evict"]), st.integers(0, 30), st.integers(1, 300)),
    max_size=120,
)


@everyone
@settings(max_examples=60, deadline=None)
@given(steps=steps)
def test_against_a_model(name: str, steps: list[Step]) -> None:
    """Whatever happens, victims are held records without children, and the structure is whole."""
    policy = eviction.build({"name": name}, CAPACITY)
    parents: dict[int, int] = {}
    names: dict[int, bytes] = {}
    number = 0
    for what, choice, size in steps:
        known = sorted(parents)
        chosen = known[choice % len(known)] if known else -1
        if what == "add":
            fresh = bytes([choice]) * 16
            if fresh in names.values():
                continue
            parent = chosen if choice % 3 else -1
            policy.add(item(number, parent, size, name=fresh))
            parents[number], names[number] = parent, fresh
            number += 1
        elif known and what == "use":
            policy.use(chosen)
        elif known and what == "remove":
            policy.remove(chosen)
            del parents[chosen], names[chosen]
        elif what == "evict":
            for record in policy.victims(lambda record: record % 5 == 0):
                assert record in parents
                assert record % 5
                assert record not in parents.values()
                policy.remove(record)
                del parents[record], names[record]
                if choice % 2:
                    break
        policy.check_integrity()


def hit_rate(policy: Eviction, reads: list[int], sizes: int = 10) -> float:
    """Single records read in this order through a memory of ``CAPACITY`` bytes."""
    held: dict[int, int] = {}
    number = hits = 0
    for read in reads:
        if read in held:
            hits += 1
            policy.use(held[read])
            continue
        while len(held) * sizes > CAPACITY - sizes:
            (record,) = evict(policy, 1)
            held = {key: value for key, value in held.items() if value != record}
        policy.add(item(number, name=read.to_bytes(16, "little"), size=sizes))
        held[read] = number
        number += 1
    return hits / len(reads)


LOOP = list(range(125)) * 20


def test_a_loop_larger_than_the_memory() -> None:
    rates = {name: hit_rate(eviction.build({"name": name}, CAPACITY), LOOP) for name in EVICTIONS}
    assert rates["lru"] == 0
    assert rates[eviction.DEFAULT] > 0.7


def test_a_scan_does_not_wash_out_what_is_used() -> None:
    hot = [number % 60 for number in range(600)]
    scan = list(range(1000, 1400))
    for name, limit in (("lru", 0.0), ("lirs", 0.9)):
        policy = eviction.build({"name": name}, CAPACITY)
        before = hit_rate(policy, [*hot, *scan, *range(60)])
        without = hit_rate(eviction.build({"name": name}, CAPACITY), [*hot, *scan])
        after = (before * 1060 - without * 1000) / 60
        assert after >= limit - 1e-9
        assert after > 0 or name == "lru"


def test_prefix_cost_lets_the_cheap_go_first() -> None:
    policy = eviction.build({"name": "prefix-cost"}, CAPACITY)
    policy.add(item(0, size=10, first=0))
    policy.add(item(1, size=10, first=100_000))
    policy.add(item(2, size=30, first=0))
    assert evict(policy, 3) == [2, 0, 1]


def test_prefix_cost_ages() -> None:
    """What is dear and never used goes in the end."""
    policy = eviction.build({"name": "prefix-cost"}, CAPACITY)
    policy.add(item(0, size=10, first=100_000))
    for number in range(1, 1000):
        policy.add(item(number))
        if 0 in evict(policy, 1):
            return
    pytest.fail("it stayed for ever")


def test_ghosts_are_bounded() -> None:
    policy = lirs.Lirs(lirs.Params(), CAPACITY)
    rng = random.Random(1)
    for number in range(3000):
        policy.add(item(number, size=rng.randrange(1, 300)))
        evict(policy, 1 if number > 5 else 0)
    policy.check_integrity()


def test_tables_and_parameters() -> None:
    for name, (schema, _) in EVICTIONS.items():
        assert isinstance(eviction.params({"name": name}), schema)
    with pytest.raises(BadPolicy, match="did you mean 'lirs'"):
        eviction.build({"name": "lirz"}, CAPACITY)
    with pytest.raises(BadPolicy, match=r"no parameter 'probaton'.*did you mean 'probation'"):
        eviction.build({"name": "lirs", "probaton": 1}, CAPACITY)
    assert msgspec.structs.asdict(eviction.params({"name": "lirs"})) == {"probation": 0.03}
