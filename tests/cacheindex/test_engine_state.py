"""From engine hashes to keys: copies, parents, orphans, block sizes, namespaces, groups, bounds."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_fakes import CLEARED, MODEL, SECRET, ModelEngine, batch, keys_of, removed, stored

from cacheindex.engine_state import MAX_CONFLICTS, Translator
from cacheindex.events import Cleared, Removed, Stored
from cacheindex.keys import Extra, Namespace, prompt_keys, unpack_keys
from cacheindex.table import Slot, Table

TOKENS = list(range(1000, 1000 + 4 * 2144))


class World:
    """A translator and the table it feeds."""

    def __init__(self, max_blocks: int = 100_000) -> None:
        self.translator = Translator(MODEL, SECRET, max_blocks)
        self.table = Table(1 << 26)

    def say(self, *events: dict[str, Any], form: str = "map") -> None:
        for change in self.translator.apply(batch(*events, form=form)):
            slot = Slot("w", change.event.tier, change.event.layout, change.stride, change.group)
            if isinstance(change.event, Stored):
                self.table.store(slot, unpack_keys(change.event.keys))
            elif isinstance(change.event, Removed):
                self.table.remove(slot, unpack_keys(change.event.keys))
            else:
                self.table.clear(slot)
        self.translator.check_integrity()

    def reach(self, keys: list[bytes], tier: str = "gpu") -> int:
        return max((n for slot, n in self.table.match(keys).items() if slot.tier == tier), default=0)


def run(hashes: list[Any], size: int, parent: Any = None, start: int = 0, **more: Any) -> dict[str, Any]:
    return stored(hashes, parent, TOKENS[start : start + size * len(hashes)], size, **more)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 48, 2144])
@pytest.mark.parametrize("form", ["map", "array"])
def test_block_sizes(size: int, form: str) -> None:
    world, stride = World(), max(size, 16)
    blocks = 3 * stride // size
    world.say(run(list(range(1, blocks + 1)), size), form=form)
    assert world.reach(keys_of(TOKENS)) == 3 * stride
    assert world.translator.block_size == size
    assert world.translator.stride == stride
    # Go on from a parent, one block at a time.
    for block in range(blocks, blocks + stride // size):
        world.say(run([block + 1], size, parent=block, start=block * size), form=form)
    assert world.reach(keys_of(TOKENS)) == 4 * stride
    world.say(removed([blocks + 1]), form=form)
    assert world.reach(keys_of(TOKENS)) == 3 * stride


@pytest.mark.parametrize("size", [3, 17, 24, 40, 0, -16])
def test_other_block_sizes_make_a_source_unusable(size: int) -> None:
    world = World()
    world.say(run([1], max(size, 1)) | {"block_size": size})
    if size < 0:
        assert world.translator.skipped["bad_event"] == 1
    else:
        assert "neither divide" in world.translator.reason
    assert world.reach(keys_of(TOKENS)) == 0


def test_copies_are_counted() -> None:
    world = World()
    world.say(run([1, 2], 16), run([2], 16, parent=1, start=16))
    world.say(removed([2]))
    assert world.reach(keys_of(TOKENS)) == 32
    world.say(removed([2]))
    assert world.reach(keys_of(TOKENS)) == 16
    world.say(removed([2]))
    assert world.translator.skipped["unknown_removal"] == 1
    assert world.reach(keys_of(TOKENS)) == 16


def test_two_hashes_of_one_prompt_hold_one_key() -> None:
    """An adapter's name pointed at other files: other hashes, the same key."""
    world = World()
    world.say(run([1], 16), run([9], 16))
    world.say(removed([1]))
    assert world.reach(keys_of(TOKENS)) == 16
    world.say(removed([9]))
    assert world.reach(keys_of(TOKENS)) == 0
    assert world.translator.blocks == 0


def test_orphans_are_skipped_and_counted() -> None:
    world = World()
    world.say(run([5, 6], 16, parent=4, start=32), run([7], 16, parent=6, start=64))
    assert world.translator.skipped["orphan"] == 3
    assert world.reach(keys_of(TOKENS)) == 0


@pytest.mark.parametrize("size", [1, 4])
def test_a_key_needs_all_its_parts(size: int) -> None:
    world, parts = World(), 16 // size
    world.say(run(list(range(parts)), size))
    world.say(removed([1]))
    assert world.reach(keys_of(TOKENS)) == 0
    world.say(run([1], size, parent=0, start=size))
    assert world.reach(keys_of(TOKENS)) == 16
    # A sibling that shares the first parts.
    other = [*TOKENS[: 16 - size], *range(size)]
    world.say(stored(["end"], parts - 2, other[16 - size :], size))
    assert world.reach(keys_of(other)) == world.reach(keys_of(TOKENS)) == 16
    world.say(removed([0]))
    assert world.reach(keys_of(other)) == world.reach(keys_of(TOKENS)) == 0
    world.say(run([0], size))
    world.say(removed([parts - 1]))
    assert (world.reach(keys_of(other)), world.reach(keys_of(TOKENS))) == (16, 0)


def test_cleared_and_then_anew() -> None:
    world = World()
    world.say(run([1, 2], 16), CLEARED, run([1], 16))
    assert world.reach(keys_of(TOKENS)) == 16
    world.say(CLEARED)
    assert world.reach(keys_of(TOKENS)) == 0
    assert world.translator.blocks == 0


def test_tiers_do_not_disturb_each_other() -> None:
    world = World()
    world.say(run([1, 2], 16), run([1, 2], 16, medium="CPU"))
    world.say(removed([1, 2]))
    assert (world.reach(keys_of(TOKENS)), world.reach(keys_of(TOKENS), "memory")) == (0, 32)
    # Announced by hash alone, as offloading connectors do.
    world.say(stored([1, 2, 3], None, [], 0, medium="STORAGE"))
    assert world.reach(keys_of(TOKENS), "disk") == 32
    assert world.translator.skipped["unknown_hash"] == 1
    assert not world.translator.gpu_only
    world.say({"type": "AllBlocksCleared", "medium": "CPU"})
    assert (world.reach(keys_of(TOKENS), "memory"), world.reach(keys_of(TOKENS), "disk")) == (0, 32)
    world.say(run([8], 16, medium="tape"))
    assert world.translator.skipped["unknown_medium"] == 1


def test_salt_and_adapter_are_namespaces() -> None:
    world = World()
    world.say(
        run([1, 2], 16, extra_keys=[["salt"], None]),
        run([11, 12], 16, lora_name="ad", extra_keys=[["ad", "salt"], ["ad"]]),
    )
    world.say(run([3], 16, parent=2, start=32))
    assert world.reach(keys_of(TOKENS, salt="salt")) == 48
    assert world.reach(keys_of(TOKENS, "ad", "salt")) == 32
    assert world.reach(keys_of(TOKENS)) == world.reach(keys_of(TOKENS, "ad")) == 0
    assert world.reach(keys_of(TOKENS, salt="other")) == 0


def test_an_adapter_known_by_number_only_matches_nothing() -> None:
    world = World()
    world.say(run([1], 16, lora_id=3, extra_keys=[["hidden"]]))
    assert world.reach(keys_of(TOKENS)) == world.reach(keys_of(TOKENS, salt="hidden")) == 0
    assert world.translator.blocks == 1


@pytest.mark.parametrize("size", [4, 16, 32])
def test_multimodal_items_enter_once_where_they_begin(size: int) -> None:
    # Items at 20 (reaching to 60) and at 61; every engine block they touch names them.
    items = [("img", 20, 60), ("vid", 61, 64)]
    extra_keys = []
    for start in range(0, 64, size):
        inside = [[name, at - start] for name, at, end in items if at < start + size and end > start]
        extra_keys.append(inside or None)
    world = World()
    hashes = list(range(64 // size))
    world.say(run(hashes, size, extra_keys=extra_keys))
    root = Namespace(MODEL).root(SECRET)
    expected = prompt_keys(root, TOKENS[:64], [Extra(20, "img"), Extra(61, "vid")])
    assert world.reach(expected) == 64
    assert world.reach(keys_of(TOKENS)) == (16 if size <= 16 else 0)


def test_what_cannot_be_named_is_left_out() -> None:
    world = World()
    world.say(run([1, 2, 3], 16, extra_keys=[None, [b"digest of embeddings"], None]))
    assert world.reach(keys_of(TOKENS)) == 16
    assert world.translator.skipped["unnameable"] == 2
    world.say(run([7], 16, extra_keys=[["one", "two"]]))
    assert world.translator.skipped["unnameable"] == 3


def test_groups() -> None:
    world = World()
    full = {"kv_cache_spec_kind": "full_attention"}
    # A hash names the prompt up to a block's end, whatever the group.
    world.say(run([1, 2], 16, group_idx=0, **full), run([2], 32, group_idx=1, **full))
    assert {(slot.group, slot.stride): n for slot, n in world.table.match(keys_of(TOKENS)).items()} == {
        (0, 16): 32,
        (1, 32): 32,
    }
    world.say(removed([1], group_idx=0))
    assert {slot.group: n for slot, n in world.table.match(keys_of(TOKENS)).items()} == {0: 0, 1: 32}


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "unknown", "x y"])
def test_other_kinds_of_groups_make_a_source_unusable(kind: str) -> None:
    world = World()
    world.say(run([1], 16, group_idx=1, kv_cache_spec_kind=kind), run([1], 16, group_idx=0))
    assert world.translator.reason.startswith("KV group 1 is ")
    assert "x y" not in world.translator.reason
    assert world.reach(keys_of(TOKENS)) == 0


def test_several_groups_of_unknown_kind_are_unusable() -> None:
    world = World()
    world.say(run([1], 16, group_idx=0), run([1], 16, group_idx=1))
    assert "several KV groups" in world.translator.reason


def test_hashes_that_do_not_name_prefixes_are_noticed() -> None:
    world = World()
    for turn in range(MAX_CONFLICTS + 1):
        world.say(stored([1, 2], None, [turn] * 32, 16))
    assert "do not name prefixes" in world.translator.reason


def test_misaligned_and_odd_events() -> None:
    world = World()
    world.say(run([1], 32))
    world.say(stored([2], 1, range(20), 32), run([3], 16, parent=1, start=32))
    world.say(stored([4], 1, [-1] * 32, 32), stored([5], 1, ["x"] * 32, 32))
    assert world.translator.skipped == {"misaligned": 1, "other_block_size": 1, "bad_event": 2}
    assert world.reach(keys_of(TOKENS)) == 32


def test_memory_is_bounded() -> None:
    world = World(max_blocks=10)
    world.say(run(list(range(15)), 16))
    assert world.translator.blocks == 10
    assert world.translator.skipped["given_up"] == 5
    assert world.table.stats().entries == 10


def test_the_salt_shows_nowhere() -> None:
    secret = "the tenant's salt"
    event = run([1], 16, extra_keys=[[secret]])
    translator = Translator(MODEL, SECRET)
    changes = translator.apply(batch(event))
    shown = repr(batch(event)) + repr(changes) + repr(translator) + repr(translator.skipped)
    assert secret not in shown


def test_one_event_each_for_a_run() -> None:
    translator = Translator(MODEL, SECRET)
    changes = translator.apply(batch(run([1], 16), run([2], 16, 1, 16), removed([2]), removed([1]), CLEARED))
    assert [type(change.event) for change in changes] == [Stored, Removed, Cleared]


@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16, 32, 48]), st.sampled_from(["map", "array"]))
@settings(max_examples=40, deadline=None)
def test_the_table_equals_the_engine(seed: int, size: int, form: str) -> None:
    """A cache under pressure, all events arriving: 40 runs of 16 prompts."""
    rng = random.Random(seed)
    engine, world = ModelEngine(size, 240 // size, rng.choice(["int", "bytes", "str"])), World()
    stems = [[rng.randrange(9) for _ in range(rng.randrange(1, 90))] for _ in range(3)]
    prompts = [rng.choice(stems) + [rng.randrange(9) for _ in range(rng.randrange(1, 60))] for _ in range(16)]
    for prompt in prompts:
        world.say(*engine.compute(prompt), form=form)
        if rng.random() < 0.05:
            world.say(*engine.clear(), form=form)
    stride = max(size, 16)
    assert [world.reach(keys_of(prompt)) for prompt in prompts] == [
        engine.reach(prompt, stride) for prompt in prompts
    ]
    world.table.check_integrity()
