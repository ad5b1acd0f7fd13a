"""Slow, crowded and hostile: the loop runs on, threads stay bounded, nothing raises."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheindex.keys import text_tokens
from gateway import config
from gateway.openai import CompletionRequest
from gateway.segments import Memory, Segments
from gateway.tokenizer import Rendering, Templates, Tokenizer
from gateway.tokens import Tokenizers
from loadtest.harness import eventually
from tests.gateway.asks import chat, one, user


class Slow:
    """A backend that encodes when it is let go. ``begun`` counts the texts it was given."""

    def __init__(self) -> None:
        self.go, self.begun, self.seen = threading.Event(), threading.Semaphore(0), 0

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool) -> Any:
        self.seen += 1
        self.begun.release()
        assert self.go.wait(30.0)
        return [Encoded(len(input[0]))]

    def num_special_tokens_to_add(self, is_pair: bool) -> int:
        return 0

    def post_process(self, encoding: Any, *, add_special_tokens: bool) -> Any:
        return encoding


class Encoded:
    def __init__(self, size: int) -> None:
        self.ids = [size]

    def __len__(self) -> int:
        return len(self.ids)


def slow_loader(backend: Slow) -> Callable[..., Tokenizer]:
    def loader(root: str, rendering: Rendering, clock: Callable[[], float], memory: Memory) -> Tokenizer:
        segments = Segments(backend, [], memory)
        nothing = Templates(None, None, "no_template")
        return Tokenizer(backend, nothing, special={}, longest=100, segments=segments)

    return loader


async def slow_tokenizers(backend: Slow, **settings: Any) -> Tokenizers:
    made = Tokenizers(config.Tokens(**settings), loader=slow_loader(backend))
    await made.load("m", "anywhere")
    return made


async def begun(backend: Slow) -> None:
    assert await asyncio.to_thread(backend.begun.acquire, timeout=10.0)


async def test_the_loop_runs_on_while_a_tokenizer_is_slow() -> None:
    backend = Slow()
    made = await slow_tokenizers(backend, deadline_s=30.0)
    waiting = asyncio.ensure_future(one(made, CompletionRequest(prompt="abc")))
    await begun(backend)
    ticks = 0
    while ticks < 1000:  # each is a full turn of the loop
        await asyncio.sleep(0)
        ticks += 1
    assert not waiting.done()
    backend.go.set()
    assert list((await waiting).tokens) == [3]
    made.close()


async def test_a_late_result_is_dropped_and_the_next_request_gets_its_own() -> None:
    backend = Slow()
    made = await slow_tokenizers(backend, deadline_s=0.05, threads=1)
    while made.lost_threads < 1:  # on a busy machine one may be late before it begins
        late = await one(made, CompletionRequest(prompt="abc"))
        assert (late.kind, late.reason) == ("text", "late")
    assert list(late.tokens) == list(text_tokens("abc"))
    backend.go.set()
    assert list((await one(made, CompletionRequest(prompt="abcde"))).tokens) == [5]
    made.close()


async def test_runaway_work_holds_a_bounded_number_of_threads_and_costs_no_waiting_then() -> None:
    backend = Slow()
    made = await slow_tokenizers(backend, deadline_s=0.05, threads=2)
    before = threading.active_count()
    while made.lost_threads < 4:
        assert (await one(made, CompletionRequest(prompt="abc"))).reason == "late"
    refused = [(await one(made, CompletionRequest(prompt="abc"))).reason for _ in range(50)]
    assert refused == ["busy"] * 50
    assert backend.seen == made.lost_threads == 4
    assert threading.active_count() <= before + 2
    backend.go.set()
    await eventually(lambda: not made.lost_threads)
    assert list((await one(made, CompletionRequest(prompt="abcd"))).tokens) == [4]
    made.close()


async def test_more_than_pending_are_refused_at_once() -> None:
    backend = Slow()
    made = await slow_tokenizers(backend, deadline_s=30.0, threads=1, pending=3)
    waiting = [asyncio.ensure_future(one(made, CompletionRequest(prompt="a" * n))) for n in range(1, 8)]
    await begun(backend)
    more = asyncio.ensure_future(one(made, CompletionRequest(prompt="aaaaaaaa")))
    done, _ = await asyncio.wait([*waiting, more], return_when=asyncio.FIRST_COMPLETED)
    backend.go.set()
    found = await asyncio.gather(*waiting, more)
    assert {p.reason for p in found} == {"", "busy"}
    assert all(task.result().reason == "busy" for task in done)
    assert all(list(p.tokens) == [n] for n, p in enumerate(found[:7], 1) if p.kind == "tokens")
    made.close()


async def test_a_cancelled_request_is_never_begun() -> None:
    backend = Slow()
    made = await slow_tokenizers(backend, deadline_s=30.0, threads=1)
    first = asyncio.ensure_future(one(made, CompletionRequest(prompt="a")))
    await begun(backend)
    second = asyncio.ensure_future(one(made, CompletionRequest(prompt="bb")))
    await asyncio.sleep(0)
    assert made.waiting == 1
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert made.waiting == 0
    backend.go.set()
    assert (await first).kind == "tokens"
    assert (await one(made, CompletionRequest(prompt="ccc"))).kind == "tokens"
    assert backend.seen == 2
    made.close()


async def test_closed_means_by_text() -> None:
    backend = Slow()
    made = await slow_tokenizers(backend, deadline_s=30.0, threads=1)
    running = asyncio.ensure_future(one(made, CompletionRequest(prompt="a")))
    await begun(backend)
    queued = asyncio.ensure_future(one(made, CompletionRequest(prompt="b")))
    await asyncio.sleep(0)
    made.close()
    assert (await queued).reason == "busy"
    assert (await one(made, CompletionRequest(prompt="c"))).reason == "busy"
    backend.go.set()
    assert (await running).kind == "tokens"


@pytest.fixture
async def tokenizers(tiny_model: Path) -> AsyncIterator[Tokenizers]:
    made = Tokenizers(config.Tokens(deadline_s=20.0))
    await made.load("m", str(tiny_model))
    assert made.known("m"), made.why_not("m")
    yield made
    made.close()


HOSTILE = {
    "one letter": "a" * 1_000_000,
    "no spaces": "日本語文字列" * 20_000,
    "zalgo": "z̷̢̛͙͔̈́" * 20_000,
    "special tokens": "<|im_start|>" * 100_000,
    "spaces": " " * 300_000,
    "emoji": "👩‍👩‍👧‍👦" * 10_000,
    "nul": "\0\x1e\x7f" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_text_neither_raises_nor_holds_the_loop(tokenizers: Tokenizers, name: str) -> None:
    text, turns, over = HOSTILE[name], 0, False

    async def watch() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    assert (await one(tokenizers, CompletionRequest(prompt=text), None)).kind == "tokens"
    assert turns > 100  # with the interpreter lock held while encoding, it is two or three
    assert (await one(tokenizers, chat(user(text)), None)).kind == "tokens"
    assert (await one(tokenizers, CompletionRequest(prompt=text), 8192)).reason in ("", "too_long")
    over = True
    await watching


async def test_deep_and_wide_requests_are_harmless(tokenizers: Tokenizers) -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    nested = {"type": "function", "function": {"name": "f", "parameters": {"deep": deep}}}
    assert (await one(tokenizers, chat(user(), tools=[nested]))).reason == "failed"
    arguments = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    assert (
        await one(tokenizers, chat(user(), {"role": "assistant", "tool_calls": [arguments]}))
    ).kind == "text"
    assert (await one(tokenizers, chat(user([{"type": "odd", "deep": deep}])))).reason == "messages"
    many = await one(tokenizers, chat(*(user("a") for _ in range(100_000))), None)
    assert many.kind in ("tokens", "text")
    wide = chat(user(), chat_template_kwargs={f"k{n}": n for n in range(100_000)})
    assert (await one(tokenizers, wide)).kind == "tokens"


@pytest.fixture(scope="session")
def shared(tiny_model: Path) -> Iterator[Tokenizers]:
    """For the property test, whose many event loops share one pool."""
    made = Tokenizers(config.Tokens(deadline_s=20.0))
    asyncio.run(made.load("m", str(tiny_model)))
    yield made
    made.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "odd"]), "text": JSON})


@settings(deadline=None)
@given(
    JSON | st.lists(PARTS, max_size=3),
    JSON,
    st.sampled_from(["system", "user", "assistant", "tool", "developer", "\ud800"]),
)
def test_no_message_makes_it_raise(shared: Tokenizers, content: Any, other: Any, role: str) -> None:
    message = {"role": role, "content": content, "tool_calls": other, "name": other, "reasoning": other}
    tools = [{"type": "function", "function": other}] if isinstance(other, dict) else None
    request = chat(message, tools=tools, documents=other, reasoning_effort=other)
    prompt = asyncio.run(one(shared, request))
    assert prompt.kind in ("tokens", "text")
    assert isinstance(prompt.tokens, array)
