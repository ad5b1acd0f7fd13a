"""The simulated block cache: vLLM's habits, and a model-based test against a plain list of blocks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loadtest.sim.cache import BlockCache, Cleared, Removed, Space, Stored, TooLarge

PLAIN = Space()


def run(cache: BlockCache, prompt: list[int], output: int = 0, space: Space = PLAIN) -> int:
    """One request from admission to its end; the tokens it found cached."""
    held = cache.open(prompt, space, output)
    assert held is not None
    cache.computed_prompt(held)
    for token in range(output):
        cache.append(held, 1000 + token)
    cache.free(held)
    cache.check_integrity()
    return held.cached_tokens


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65])
def test_a_repeated_prompt_is_cached_but_for_the_block_with_its_last_token(
    block_size: int, length: int
) -> None:
    cache = BlockCache(512, block_size)
    prompt = list(range(length))
    assert run(cache, prompt) == 0
    assert run(cache, prompt) == (length - 1) // block_size * block_size


def test_the_recomputed_last_block_is_a_second_copy_with_its_own_announcement() -> None:
    cache = BlockCache(16, 4)
    run(cache, list(range(8)))
    first = cache.take_events()
    run(cache, list(range(8)))
    second = cache.take_events()
    assert isinstance(first[0], Stored)
    assert isinstance(second[0], Stored)
    assert first[0].hashes[1] == second[0].hashes[0]
    assert second[0].parent == first[0].hashes[0]
    assert cache.copies(list(range(8))) == 2


def test_each_copy_is_removed_on_its_own() -> None:
    cache = BlockCache(8, 4)  # seven usable blocks
    run(cache, list(range(8)))
    run(cache, list(range(8)))
    (stored,) = (event for event in cache.take_events()[:1] if isinstance(event, Stored))
    run(cache, list(range(100, 100 + 28)))
    removed = [event.hash for event in cache.take_events() if isinstance(event, Removed)]
    assert sorted(removed) == sorted([*stored.hashes, stored.hashes[1]])
    assert cache.match([*range(8), 9]) == 0


def test_a_requests_tail_is_taken_before_its_head_and_old_requests_before_new() -> None:
    cache = BlockCache(9, 4)
    run(cache, list(range(16)))
    run(cache, list(range(100, 116)))
    run(cache, list(range(200, 208)))
    assert cache.match([*range(16), 0]) == 8
    assert cache.match([*range(100, 116), 0]) == 16


def test_a_hit_makes_blocks_young_again() -> None:
    cache = BlockCache(9, 4)
    run(cache, list(range(12)))
    run(cache, list(range(100, 112)))
    run(cache, [*range(12), 1])
    run(cache, list(range(200, 216)))
    assert cache.match([*range(12), 1]) == 12
    assert cache.match([*range(100, 112), 1]) < 12


def test_output_is_cached_but_never_the_last_sampled_token() -> None:
    cache = BlockCache(64, 4)
    run(cache, [1, 2, 3], output=5)  # 8 tokens, the last without KV
    assert cache.match([1, 2, 3, 1000, 1001, 1002, 1003, 1004, 9]) == 4
    run(cache, [1, 2, 3], output=6)
    assert cache.match([1, 2, 3, 1000, 1001, 1002, 1003, 1004, 9]) == 8


def test_adapter_and_salt_keep_caches_apart() -> None:
    cache = BlockCache(64, 4)
    spaces = [Space(), Space("lora"), Space("", "salt"), Space("lora", "salt"), Space("", "other")]
    for space in spaces:
        assert run(cache, list(range(9)), space=space) == 0
    for space in spaces:
        assert run(cache, list(range(9)), space=space) == 8
    assert cache.held().keys() == set(spaces)


def test_seeds_change_hashes_and_nothing_else() -> None:
    caches = [BlockCache(16, 4, seed) for seed in ("a", "b")]
    for cache in caches:
        run(cache, list(range(8)))
    first, second = (cache.take_events()[0] for cache in caches)
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert not set(first.hashes) & set(second.hashes)
    assert caches[0].held() == caches[1].held()


def test_room_is_kept_for_the_output_and_a_request_waits_for_it() -> None:
    cache = BlockCache(5, 4)
    first = cache.open(list(range(8)), PLAIN, 8)
    assert first is not None
    assert cache.open([1], PLAIN, 0) is None
    cache.free(first)
    assert cache.open([1], PLAIN, 0) is not None


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(TooLarge):
        BlockCache(5, 4).open(list(range(16)), PLAIN, 1)


def test_reset_waits_for_running_requests() -> None:
    cache = BlockCache(16, 4)
    held = cache.open(list(range(8)), PLAIN, 0)
    assert held is not None
    cache.computed_prompt(held)
    assert not cache.reset()
    cache.free(held)
    assert cache.reset()
    assert isinstance(cache.take_events()[-1], Cleared)
    assert cache.held() == {}
    assert cache.match(list(range(9))) == 0


class CacheAgainstModel(RuleBasedStateMachine):
    """The cache against a list of physical blocks, each with the token prefix it stands for.

    The model knows prefixes, not hashes, and keeps free blocks in one plain list.
    """

    @initialize(blocks=st.integers(3, 12), block_size=st.integers(1, 4))
    def start(self, blocks: int, block_size: int) -> None:
        self.size = block_size
        self.cache = BlockCache(blocks, block_size)
        self.free: list[int] = list(range(1, blocks))
        self.prefix: dict[int, tuple[Space, tuple[int, ...]]] = {}
        self.age: dict[int, int] = {}
        self.ticks = 0
        self.refs: dict[int, int] = {}
        self.running: list[tuple[object, list[int], list[int], Space, int]] = []
        self.listener: dict[bytes, int] = {}
        self.promised = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        output=st.integers(0, 5),
        salt=st.sampled_from(["", "s"]),
    )
    def admit(self, prompt: list[int], output: int, salt: str) -> None:
        space = Space("", salt)
        hits: list[int] = []
        for end in range(self.size, len(prompt), self.size):
            same = [b for b, held in self.prefix.items() if held == (space, tuple(prompt[:end]))]
            if not same:
                break
            hits.append(min(same, key=self.age.__getitem__))
        total = -(-(len(prompt) + output) // self.size)
        try:
            held = self.cache.open(prompt, space, output)
        except TooLarge:
            assert total > len(self.free) + len(self.refs)
            return
        idle = sum(block in self.free for block in hits)
        if held is None:
            assert len(self.free) - idle - self.promised < total - len(hits)
            return
        assert held.cached_tokens == len(hits) * self.size
        for block in hits:
            if block in self.free:
                self.free.remove(block)
            self.refs[block] = self.refs.get(block, 0) + 1
        blocks = [*hits, *(self.take() for _ in range(-(-len(prompt) // self.size) - len(hits)))]
        self.promised += total - len(blocks)
        self.cache.computed_prompt(held)
        self.fill(blocks, prompt, space, len(hits), len(prompt))
        self.running.append((held, list(prompt), blocks, space, len(prompt) + output))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def decode(self, which: int, token: int) -> None:
        held, tokens, blocks, space, limit = self.running[which % len(self.running)]
        if len(tokens) >= limit:
            return
        self.cache.append(held, token)  # type: ignore[arg-type]
        if len(tokens) > len(blocks) * self.size:
            blocks.append(self.take())
            self.promised -= 1
        self.fill(blocks, tokens, space, (len(tokens) - 1) // self.size, len(tokens))
        tokens.append(token)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        held, _, blocks, _, limit = self.running.pop(which % len(self.running))
        self.cache.free(held)  # type: ignore[arg-type]
        self.promised -= -(-limit // self.size) - len(blocks)
        plain: list[int] = []
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                (self.free if block in self.prefix else plain).append(block)
        self.free[:0] = plain

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self) -> None:
        assert self.cache.reset()
        self.prefix.clear()

    def take(self) -> int:
        block = self.free.pop(0)
        self.prefix.pop(block, None)
        self.refs[block] = 1
        return block

    def fill(self, blocks: list[int], tokens: list[int], space: Space, first: int, length: int) -> None:
        for index in range(first, length // self.size):
            if blocks[index] not in self.prefix:
                self.ticks += 1
                self.age[blocks[index]] = self.ticks
                self.prefix[blocks[index]] = (space, tuple(tokens[: (index + 1) * self.size]))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        truth: dict[Space, set[tuple[int, ...]]] = {}
        for space, prefix in self.prefix.values():
            truth.setdefault(space, set()).add(prefix)
        assert self.cache.held() == truth

    @invariant()
    def a_listener_that_counts_copies_is_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        for event in self.cache.take_events():
            if isinstance(event, Stored):
                for digest in event.hashes:
                    self.listener[digest] = self.listener.get(digest, 0) + 1
            elif isinstance(event, Removed):
                self.listener[event.hash] -= 1
                assert self.listener[event.hash] >= 0
            else:
                self.listener.clear()
        assert sum(self.listener.values()) == len(self.prefix)


CacheAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheAgainstModel = CacheAgainstModel.TestCase
