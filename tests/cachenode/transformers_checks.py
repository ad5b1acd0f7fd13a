"""Imported by the engine's Python: what the transformers connector does with tiny caches and a node in the
same process. Each check raises where it does not hold; ``CHECKS`` names them."""

import random
from collections.abc import Callable

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from cachenode.connectors import transformers as connector
from cachenode.connectors.naming import Asked
from cachenode.connectors.transformers import Prefixes, UnfitCache, layout_of, refuse
from cachenode.record import Layout
from tests.cachenode.transformers_fake import FakeNode


def layout(dtype: str = "float32", block_tokens: int = 32, **fields: object) -> Layout:
    whole = {"model": "model", "layers": 2, "heads": 3, "head_size": 4, "revision": "r", **fields}
    size = whole["layers"] * 2 * whole["heads"] * block_tokens * whole["head_size"]  # type: ignore[operator]
    itemsize = getattr(torch, dtype).itemsize
    return Layout(
        family="transformers",
        memory=connector.MEMORY,
        dtype=dtype,
        block_tokens=block_tokens,
        block_bytes=size * itemsize,
        **whole,  # type: ignore[arg-type]
    )


def filled(length: int, of: Layout, seed: int = 0) -> DynamicCache:
    """A cache of random numbers, in strides that no model of ours would give it."""
    cache, generator = DynamicCache(), torch.Generator().manual_seed(seed)
    for number in range(of.layers):
        states = torch.randn(2, 1, length, of.heads, of.head_size, generator=generator)
        keys, values = states.to(getattr(torch, of.dtype)).transpose(2, 3)
        cache.update(keys, values, number)
    return cache


def same(one: DynamicCache, other: DynamicCache, length: int) -> bool:
    """Whether ``other`` is the first ``length`` tokens of ``one``, bit for bit."""
    pairs = [(a[:2], b[:2]) for a, b in zip(one, other, strict=True)]
    return other.get_seq_length() == length and all(
        torch.equal(mine[:, :, :length].view(torch.uint8), theirs.view(torch.uint8))
        for a, b in pairs
        for mine, theirs in zip((x.contiguous() for x in a), b, strict=True)
    )


def prefixes(node: FakeNode, of: Layout, **fields: object) -> Prefixes:
    secret = fields.pop("secret", None)
    return Prefixes(node, node.join, of, Asked(**fields), secret=secret)  # type: ignore[arg-type]


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def refusal(kind: type[Exception], call: Callable[[], object]) -> str:
    """What the error says."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("not refused")


def every_length_comes_back() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for block in (16, 32, 48):
            of = layout(dtype, block)
            for length in (1, 15, 16, 31, 32, 33, 48, 255, 256, 257, 500, 777):
                node, cache, tokens = FakeNode(of, 4 << 20, length), filled(length, of), text(length)
                kept = prefixes(node, of)
                whole = length // block * block
                assert kept.save(cache, tokens) == whole
                assert len(node.blocks) == length // block
                restored, count = kept.restore([*tokens, 7])
                assert count == whole, (dtype, block, length, count)
                assert not count or same(cache, restored, count)
                assert not node.leases
                assert not node.reserved


def the_last_token_is_left_to_compute() -> None:
    of = layout()
    node, tokens = FakeNode(of, 1 << 20), text(64)
    prefixes(node, of).save(filled(64, of), tokens)
    for length, count in ((64, 32), (65, 64), (33, 32), (32, 0), (1, 0), (0, 0)):
        assert prefixes(node, of).restore([*tokens, 1][:length])[1] == count


def a_longer_text_adds_only_what_is_missing() -> None:
    of, tokens = layout(), text(400)
    node, cache = FakeNode(of, 4 << 20), filled(400, of)
    kept = prefixes(node, of)
    assert kept.save(filled(400, of), tokens[:100]) == 96
    assert kept.save(cache, tokens) == 384
    assert sorted(grant.blocks for _, grant, start in node.blocks.values() if not start) == [3, 4, 5]
    restored, count = kept.restore(tokens)
    assert count == 384
    assert same(cache, restored, 384)
    middle, count = kept.restore(tokens[:200])
    assert count == 192
    assert same(cache, middle, 192)


def the_shorter_of_cache_and_tokens_counts() -> None:
    of = layout()
    node = FakeNode(of, 1 << 20)
    assert prefixes(node, of).save(filled(70, of), text(200)) == 64
    assert prefixes(node, of).save(filled(200, of), text(70)) == 64
    assert prefixes(node, of).save(DynamicCache(), text(70)) == 0
    assert prefixes(node, of).save(filled(31, of), text(70)) == 0


def what_differs_never_meets() -> None:
    of, tokens = layout(), text(64)
    others: list[tuple[Layout, dict[str, object]]] = [
        (layout(revision="other"), {}),
        (layout(heads=1, layers=6), {}),
        (layout("bfloat16", head_size=8), {}),
        (layout(block_tokens=16), {}),
        (layout(model="other"), {}),
        (of, {"adapter": "adapter", "adapter_digest": "1" * 64}),
        (of, {"adapter": "adapter", "adapter_digest": "2" * 64}),
        (of, {"adapter": "other", "adapter_digest": "1" * 64}),
        (of, {"salt": "one", "secret": b"s" * 16}),
        (of, {"salt": "two", "secret": b"s" * 16}),
        (of, {"salt": "one", "secret": b"t" * 16}),
        (of, {}),
    ]
    node = FakeNode(of, 4 << 20)
    for number, (its, fields) in enumerate(others):
        node.layout = its
        kept, cache = prefixes(node, its, **fields), filled(64, its, number)
        assert kept.restore([*tokens, 1])[1] == 0, number
        assert kept.save(cache, tokens) == 64
    for number, (its, fields) in enumerate(others):
        node.layout = its
        cache, count = prefixes(node, its, **fields).restore([*tokens, 1])
        assert count == 64
        assert same(filled(64, its, number), cache, 64), number


def a_torn_record_is_a_miss_from_there_on() -> None:
    of, tokens = layout(), text(768)
    node, cache = FakeNode(of, 4 << 20), filled(768, of)
    prefixes(node, of).save(cache, tokens)
    slots = sorted({slot for slot, _, _ in node.blocks.values()})
    for torn, count in zip(slots, (0, 256, 512), strict=True):
        node.torn = {torn}
        restored, found = prefixes(node, of).restore([*tokens, 1])
        assert found == count
        assert not found or same(cache, restored, count)
        assert not node.leases


def a_node_without_room_keeps_the_beginning() -> None:
    of, tokens = layout(), text(320)
    node, cache = FakeNode(of, 4 << 20), filled(320, of)
    node.fits = 5
    assert prefixes(node, of).save(cache, tokens) == 160
    restored, count = prefixes(node, of).restore(tokens)
    assert count == 160
    assert same(cache, restored, 160)


def a_node_that_is_gone_is_a_miss() -> None:
    of, tokens = layout(), text(64)
    node = FakeNode(of, 1 << 20)
    nothing = Prefixes(node, lambda session: None, of)
    assert nothing.save(filled(64, of), tokens) == 0
    prefixes(node, of).save(filled(64, of), tokens)
    assert nothing.restore([*tokens, 1])[1] == 0
    node.mute = True
    cache, count = prefixes(node, of).restore([*tokens, 1])
    assert (count, cache.get_seq_length()) == (0, 0)
    assert node.leases
    assert prefixes(node, of).save(filled(96, of), text(96, 1)) == 0
    assert node.reserved
    node.mute = False
    assert prefixes(node, of).restore([*tokens, 1])[1] == 64
    assert not node.leases, "what was granted too late is given back"
    assert not node.reserved
    node.session = ""
    assert prefixes(node, of).save(filled(96, of), text(96, 2)) == 0


def another_session_is_another_memory() -> None:
    of, tokens = layout(), text(64)
    node = FakeNode(of, 1 << 20)
    kept = prefixes(node, of)
    kept.save(filled(64, of), tokens)
    assert node.joined == ["a session"]
    node.reconnects = True
    assert kept.restore([*tokens, 1])[1] == 0
    assert kept.save(filled(64, of, 1), text(64, 1)) == 0
    assert not node.leases
    assert not node.reserved
    node.reconnects = False
    assert kept.restore([*tokens, 1])[1] == 64
    assert node.joined == ["a session", "a session!", "a session!!"]
    assert (node.quieted, node.closed) == (node.joined[:2], 2)
    kept.close()
    assert (node.quieted, node.closed) == (node.joined, 4), "attachments and the client"


def what_cannot_be_written_whole_is_aborted() -> None:
    of, tokens = layout(), text(64)
    node = FakeNode(of, 1 << 20)
    node.short = True
    refusal(ValueError, lambda: prefixes(node, of).save(filled(64, of), tokens))
    node.copies = True
    assert prefixes(node, of).save(filled(64, of), tokens) == 0
    assert len(node.aborted) == 2
    assert not node.reserved
    assert not node.blocks


def unfit_caches_are_refused() -> None:
    of = layout()
    sliding, offloaded, quantized = filled(64, of), filled(64, of), filled(64, of)
    sliding.layers[1] = DynamicSlidingWindowLayer(sliding_window=32)
    offloaded.offloading = True
    quantized.layers[0] = type("QuantizedLayer", (DynamicLayer,), {})()
    two = DynamicCache()
    for number in range(2):
        two.update(torch.zeros(2, 3, 64, 4), torch.zeros(2, 3, 64, 4), number)
    uneven = filled(64, of)
    uneven.layers[1].crop(-1)
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, hidden_size=12)
    unfit: list[tuple[object, str]] = [
        (sliding, "not DynamicSlidingWindowLayer"),
        (offloaded, "an offloaded cache"),
        (quantized, "not QuantizedLayer"),
        (StaticCache(config, max_cache_len=64), "a StaticCache"),
        (two, "[2, 3, 64, 4]"),
        (uneven, "layer 1 holds [1, 3, 63, 4]"),
        (filled(64, layout("bfloat16")), "of torch.bfloat16"),
        (filled(64, layout(heads=2)), "[1, 2, 64, 4]"),
        (filled(64, layout(layers=3)), "has 2 layers, the cache 3"),
    ]
    for cache, why in unfit:
        node = FakeNode(of, 1 << 20)
        kept = prefixes(node, of)
        assert why in refusal(UnfitCache, lambda kept=kept, cache=cache: kept.save(cache, text(64)))
        assert not node.blocks
        assert not node.reserved
    refuse(DynamicCache(config=config), of)


def layouts_name_what_was_loaded() -> None:
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=16,
        intermediate_size=8,
        vocab_size=32,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    first = layout_of(model, "m")
    assert (first.layers, first.heads, first.head_size) == (2, 2, 4)
    assert first.block_bytes == 2 * 2 * 2 * 32 * 4 * 4
    twin = LlamaForCausalLM(config)
    assert layout_of(twin, "m").fingerprint() != first.fingerprint()
    twin.load_state_dict(model.state_dict())
    assert layout_of(twin, "m") == first
    with torch.no_grad():
        twin.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    changed = layout_of(twin, "m")
    assert changed.revision != first.revision
    assert layout_of(model.to(torch.bfloat16), "m").dtype == "bfloat16"
    assert layout_of(model, "m", revision="mine", block_tokens=16).revision == "mine"
    rope = LlamaForCausalLM(
        LlamaConfig(**{**config.to_dict(), "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    )
    rope.load_state_dict(twin.state_dict())
    assert layout_of(rope, "m").revision != changed.revision


def prompts_without_names_are_refused() -> None:
    node = FakeNode(layout(), 1 << 20)
    salted, adapted = (
        refusal(ValueError, lambda fields=fields: prefixes(node, layout(), **fields))
        for fields in ({"salt": "one"}, {"adapter": "an adapter"})
    )
    assert "salt_without_secret" in salted
    assert "adapter_unread" in adapted


def a_container_apart_gets_the_same_bytes() -> None:
    of, tokens = layout("bfloat16", layers=3, head_size=64), text(700)
    node, cache = FakeNode(of, 4 << 20), filled(700, of)
    for copies in (False, True):
        node.copies = copies
        assert prefixes(node, of).save(cache, tokens[: 320 if not copies else 700]) == (
            672 if copies else 320
        )
    for copies in (False, True):
        node.copies = copies
        restored, count = prefixes(node, of).restore(tokens)
        assert count == 672
        assert same(cache, restored, 672)
    node.torn = {max(slot for slot, _, _ in node.blocks.values())}
    assert prefixes(node, of).restore(tokens)[1] == 512


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        every_length_comes_back,
        the_last_token_is_left_to_compute,
        a_longer_text_adds_only_what_is_missing,
        the_shorter_of_cache_and_tokens_counts,
        what_differs_never_meets,
        a_torn_record_is_a_miss_from_there_on,
        a_node_without_room_keeps_the_beginning,
        a_node_that_is_gone_is_a_miss,
        another_session_is_another_memory,
        what_cannot_be_written_whole_is_aborted,
        unfit_caches_are_refused,
        layouts_name_what_was_loaded,
        prompts_without_names_are_refused,
        a_container_apart_gets_the_same_bytes,
    )
}
