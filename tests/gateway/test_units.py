"""The gateway's pure parts, without sockets."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.interrupt import Interrupt, Interrupted
from gateway.openai import ApiError, CompletionRequest, Edits, edit, parse
from gateway.prediction import Prediction, cacheable, judge
from gateway.retry import BURST, RetryBudget
from gateway.stream import MAX_EVENT_BYTES, BrokenStream, Relay, clean_answer, read_usage
from gateway.tenants import BadKeysFile, Tenant, Tenants, load_secret, load_tenants, new_key

CHUNKS = [
    b'data: {"id":"1","choices":[{"delta":{"content":"h\xc3\xa9llo \xf0\x9f\x98\x80"}}]}\n\n',
    b": keep-alive\n\n",
    b'data: {"id":"1","choices":[{"delta":{"content":"say \\"usage\\": {}"}}]}\r\n\r\n',
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":40,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n',
    b"data: [DONE]\n\n",
]
STREAM = b"".join(CHUNKS)


def relayed(parts: list[bytes], *, strip: bool, private: bool = False) -> tuple[bytes, Relay]:
    relay = Relay(strip_usage=strip, private=private)
    return b"".join(relay.feed(part) for part in parts) + relay.end(), relay


@pytest.mark.parametrize("strip", [False, True])
def test_stream_bytes_are_untouched_at_every_split(strip: bool) -> None:
    expected = STREAM if not strip else STREAM.replace(CHUNKS[3], b"")
    for first in range(len(STREAM)):
        out, relay = relayed([STREAM[:first], STREAM[first:]], strip=strip)
        assert out == expected
        assert relay.usage is not None
        assert relay.usage.cached_tokens == 32
    assert relayed([STREAM[i : i + 1] for i in range(len(STREAM))], strip=strip)[0] == expected


def test_a_private_stream_hides_what_was_cached() -> None:
    out, relay = relayed([STREAM], strip=False, private=True)
    assert b'"cached_tokens"' not in out
    assert b'"prompt_tokens":40' in out
    assert relay.usage is not None
    assert relay.usage.cached_tokens == 32


def test_an_endless_event_is_a_broken_stream() -> None:
    relay = Relay(strip_usage=False, private=False)
    with pytest.raises(BrokenStream):
        for _ in range(MAX_EVENT_BYTES // 1_000_000 + 2):
            relay.feed(b"x" * 1_000_000)


def test_answers_lose_only_what_clients_may_not_see() -> None:
    body = b'{"id": "a", "kv_transfer_params": {"remote_host": "x"}, "usage": {"prompt_tokens": 1}, "n": 1.0}'
    assert json.loads(clean_answer(body, private=False)) == {
        "id": "a",
        "usage": {"prompt_tokens": 1},
        "n": 1.0,
    }
    plain = b'{"id": "a", "kv_transfer_params": null}'
    assert clean_answer(plain, private=True) is plain
    assert clean_answer(b"not json kv_transfer_params", private=False) == b"not json kv_transfer_params"
    ec = b'{"ec_transfer_params": {"x": 1}, "a": 1}'
    assert json.loads(clean_answer(ec, private=False)) == {"a": 1}
    for hidden in (b'{"usage": {"prompt_tokens_details": ', b'{"usage": 3, "prompt_tokens_details": 1}'):
        with pytest.raises(BrokenStream):
            clean_answer(hidden, private=True)


def test_what_cannot_be_read_is_not_shown_to_those_who_may_not_see_it() -> None:
    odd = (
        b'data: {"choices":[],"usage":{"prompt_tokens":null,"prompt_tokens_details":{"cached_tokens":9}}}\n\n'
    )
    assert relayed([odd], strip=False, private=True)[0] == b""
    assert relayed([odd], strip=False, private=False)[0] == odd


def test_answers_without_usage() -> None:
    assert read_usage(b"not json") is None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=6), json_values, max_size=6), st.booleans(), st.booleans())
def test_edits_touch_nothing_else(body: dict[str, object], usage: bool, salted: bool) -> None:
    body.pop("stream_options", None)
    raw = json.dumps({**body, "kv_transfer_params": {"a": 1}}).encode("utf-8", "surrogatepass")
    out = json.loads(edit(raw, Edits(cache_salt="s" if salted else None, include_usage=usage)))
    expected = dict(body)
    if salted:
        expected["cache_salt"] = "s"
    if usage:
        expected["stream_options"] = {"include_usage": True}
    assert out == json.loads(json.dumps(expected))


def test_edit_reads_the_whole_body() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        edit(b'{"messages":[],"a\xff":1}', Edits())
    asked = edit(b'{"stream_options":{"continuous_usage_stats":true}}', Edits(include_usage=True))
    assert json.loads(asked) == {"stream_options": {"include_usage": True}}


def test_what_engines_take_is_taken() -> None:
    lax = parse("chat", b'{"messages":[],"max_tokens":16.0,"stream":1,"n":"2"}')
    assert (lax.max_tokens, lax.stream, lax.n) == (16, True, 2)
    for text in ("null", "true", "12", "1.5"):
        request = parse("completions", json.dumps({"prompt": text}).encode())
        assert isinstance(request, CompletionRequest)
        assert request.prompt == text
    with pytest.raises(ApiError, match="At most 1024 prompts"):
        parse("completions", json.dumps({"prompt": [[1]] * 1025}).encode())
    parse("completions", json.dumps({"prompt": [1] * 5000}).encode())


def test_edit_without_changes_returns_the_same_bytes() -> None:
    raw = b'{"model" : "a"}'
    assert edit(raw, Edits()) is raw
    kept = b'{"kv_transfer_params":{"a":1}}'
    assert edit(kept, Edits(drop_kv=False)) is kept
    merged = edit(b'{"stream_options":{"x":1,"include_usage":false}}', Edits(include_usage=True))
    assert json.loads(merged) == {"stream_options": {"x": 1, "include_usage": True}}


def test_parse_names_the_field() -> None:
    with pytest.raises(ApiError) as caught:
        parse("chat", b'{"messages":[{"role":"user"}],"stream":"x"}')
    assert caught.value.param == "stream"
    with pytest.raises(ApiError) as caught:
        parse("completions", b'{"model":"a"}')
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("reach", "tokens", "block", "cached"),
    [(0, 100, 16, 0), (96, 100, 16, 96), (96, 96, 16, 80), (96, 97, 16, 96), (96, 96, 32, 64), (48, 64, 32, 32), (16, 0, 16, 0)],
)  # fmt: skip
def test_what_an_engine_can_count_as_cached(reach: int, tokens: int, block: int, cached: int) -> None:
    assert cacheable(reach, tokens, block) == cached


@pytest.mark.parametrize(
    ("prediction", "reported", "evicted", "cause"),
    [
        (Prediction(64, 64, 16), 64, False, "match"),
        (Prediction(64, 64, 16), 48, False, "match"),
        (Prediction(64, 64, 16), 80, False, "match"),
        (Prediction(64, 64, 16), 0, False, "over"),
        (Prediction(64, 64, 16), 0, True, "evicted"),
        (Prediction(0, 64, 16), 64, False, "pending"),
        (Prediction(0, 64, 16), 80, False, "pending"),
        (Prediction(0, 64, 16), 96, False, "under"),
        (Prediction(64, 64, 16), None, False, "unreported"),
        (Prediction(64, 64, 16, "unread"), 0, False, "unread"),
        (Prediction(64, 64, 16, "several"), 0, False, "several"),
    ],
)
def test_what_a_difference_means(
    prediction: Prediction, reported: int | None, evicted: bool, cause: str
) -> None:
    assert judge(prediction, reported, evicted=evicted) == cause


def test_retry_budget_is_a_share_of_requests_and_a_floor_of_time() -> None:
    now = [0.0]
    budget = RetryBudget(share=0.1, floor=2.0, clock=lambda: now[0])
    assert sum(budget.take() for _ in range(100)) == BURST
    for _ in range(100):
        budget.request()
    assert sum(budget.take() for _ in range(100)) == pytest.approx(10, abs=1)
    now[0] += 3.0
    assert sum(budget.take() for _ in range(100)) == 6


async def test_interrupt_becomes_an_exception_only_inside_its_block() -> None:
    interrupt = Interrupt()
    interrupt.fire("too early")
    with pytest.raises(Interrupted, match="gone"), interrupt:
        asyncio.get_running_loop().call_soon(interrupt.fire, "gone")
        await asyncio.Event().wait()
    interrupt.fire("too late")
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_nested_interrupts_are_told_apart() -> None:
    outer, inner = Interrupt(), Interrupt()
    with pytest.raises(Interrupted, match="outer"), outer, inner:
        asyncio.get_running_loop().call_soon(outer.fire, "outer")
        await asyncio.Event().wait()
    outer, inner = Interrupt(), Interrupt()
    with pytest.raises(Interrupted, match="inner"), outer, inner:
        asyncio.get_running_loop().call_soon(inner.fire, "inner")
        await asyncio.Event().wait()


async def test_a_real_cancellation_stays_one() -> None:
    interrupt = Interrupt()

    async def wait() -> None:
        with interrupt:
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_keys_files(tmp_path: Path) -> None:
    key, entry = new_key("acme")
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- tenant: acme\n  sha256: {entry.sha256}\n")
    tenants = load_tenants(str(path), b"s" * 32)
    assert tenants.who(f"Bearer {key}") == Tenant("acme")
    assert tenants.who(f"bearer {key}") == Tenant("acme")
    for wrong in (None, "", key, f"Basic {key}", f"Bearer {key[:-1]}", "Bearer ", "Bearer \udcff"):
        assert tenants.who(wrong) is None
    assert not tenants.several
    assert tenants.salt(Tenant("acme"), "own") == "own"
    for text in (
        "keys: []",
        "nonsense",
        "keys: [{tenant: a, sha256: zz}]",
        "keys: [{tenant: a, sha256: 00, x: 1}]",
        "- [",
    ):
        path.write_text(text)
        with pytest.raises(BadKeysFile, match="keys"):
            load_tenants(str(path), b"s" * 32)
    with pytest.raises(BadKeysFile, match="No such file"):
        load_tenants(str(tmp_path / "none"), b"")


@given(
    st.text(max_size=5), st.text(max_size=5), st.none() | st.text(max_size=5), st.none() | st.text(max_size=5)
)
def test_no_two_tenants_share_a_salt(one: str, two: str, salt: str | None, other: str | None) -> None:
    entries = [new_key("a")[1], new_key("b")[1]]
    tenants = Tenants(entries, b"k" * 32)
    one, two = one.encode("utf-8", "replace").decode(), two.encode("utf-8", "replace").decode()
    same = (one, salt or "") == (two, other or "")
    assert (tenants.salt(Tenant(one), salt) == tenants.salt(Tenant(two), other)) == same


def test_secret_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 40)
    path.chmod(0o644)
    with pytest.raises(BadKeysFile, match="chmod 600"):
        load_secret(str(path))
    path.chmod(0o600)
    assert load_secret(str(path)) == b"x" * 40
    path.write_bytes(b"short")
    with pytest.raises(BadKeysFile, match="at least 16"):
        load_secret(str(path))
    assert len(load_secret(None)) == 32
    assert load_secret(None) != load_secret(None)
