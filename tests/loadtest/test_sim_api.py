"""The simulated engine's API, spoken to by the official client and by raw requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from loadtest.harness import eventually, fleet
from loadtest.sim.clock import HandClock
from loadtest.sim.config import SimConfig
from loadtest.sim.tokens import ByteTokenizer, FolderTokenizer
from loadtest.simengine import SimEngine, ThreadedSim
from loadtest.tinymodel import write_tiny_model

HELLO: Any = [{"role": "user", "content": "hello there, this is a prompt that fills more than a few blocks"}]


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    config = SimConfig(adapters={"lora": "/adapters/lora"}, dev_mode=True, max_model_len=512)
    async with SimEngine(config) as started:
        yield started
        assert started.errors == 0
        started.app.cache.check_integrity()


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as ready:
        yield ready


@pytest.fixture
async def raw(engine: SimEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url) as ready:
        yield ready


async def test_chat_says_the_same_again_and_reports_what_was_cached(client: AsyncOpenAI) -> None:
    answers = [
        await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=8) for _ in range(2)
    ]
    first, second = answers
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].finish_reason == "length"
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.completion_tokens == 8
    assert first.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details is not None
    expected = (second.usage.prompt_tokens - 1) // 16 * 16
    assert second.usage.prompt_tokens_details.cached_tokens == expected


async def test_a_streamed_chat_has_vllms_chunks(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="sim",
        messages=HELLO,
        stream=True,
        max_tokens=5,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    whole = await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=5)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 5 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert len({c.id for c in chunks}) == 1


async def test_usage_comes_only_when_asked(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="sim", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_completions_take_all_four_kinds_of_prompt(client: AsyncOpenAI) -> None:
    for prompt, count in (("abc", 1), (["abc", "xyz"], 2), ([97, 98, 99], 1), ([[97, 98, 99], [120]], 2)):
        answer = await client.completions.create(model="sim", prompt=prompt, max_tokens=4, echo=True)
        assert len(answer.choices) == count
        assert answer.choices[0].text.startswith("abc")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4 * count


async def test_several_choices_are_streamed_with_their_index(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(model="sim", prompt=["a", "b"], n=2, max_tokens=3, stream=True)
    texts = dict.fromkeys(range(4), "")
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    whole = await client.completions.create(model="sim", prompt=["a", "b"], n=2, max_tokens=3)
    assert texts == {choice.index: choice.text for choice in whole.choices}


async def test_salt_and_adapter_are_caches_of_their_own(client: AsyncOpenAI, engine: SimEngine) -> None:
    cached = []
    for model, salt in (("sim", None), ("sim", "s"), ("lora", None), ("lora", "s"), ("sim", "s")):
        extra = {} if salt is None else {"cache_salt": salt}
        answer = await client.chat.completions.create(model=model, messages=HELLO, extra_body=extra)
        assert answer.model == model
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:4] == [0] * 4
    assert cached[4] == 80
    assert len(engine.app.cache.held()) == 4


async def test_models_list_the_base_first_and_adapters_with_their_parent(client: AsyncOpenAI) -> None:
    base, lora = (await client.models.list()).data
    assert (base.id, base.model_extra["max_model_len"]) == ("sim", 512)  # type: ignore[index]
    assert (lora.id, lora.model_extra["parent"]) == ("lora", "sim")  # type: ignore[index]
    assert lora.model_extra["root"] == "/adapters/lora"  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b"\xff\xfe", 400),
        ("/v1/chat/completions", b'{"model": "sim"}', 400),
        ("/v1/chat/completions", b'{"model": "sim", "messages": [{"content": "x"}]}', 400),
        ("/v1/chat/completions", b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404),
        ("/v1/completions", b'{"model": "sim", "prompt": 7}', 400),
        ("/v1/completions", b'{"model": "sim", "prompt": []}', 400),
        ("/v1/completions", b'{"model": "sim", "prompt": "x", "max_tokens": "many"}', 400),
        ("/v1/completions", b'{"model": "sim", "prompt": "x", "max_tokens": 600}', 400),
        ("/v1/completions", b'{"model": "sim", "prompt": "' + b"x" * 600 + b'"}', 400),
        ("/nowhere", b"{}", 404),
    ],
)
async def test_wrong_requests_get_openai_errors(
    raw: httpx.AsyncClient, path: str, body: bytes, status: int
) -> None:
    answer = await raw.post(path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == status
    assert error["message"]
    assert error["type"] in {"BadRequestError", "NotFoundError"}


async def test_the_client_sees_its_own_exception_classes(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model="sim", prompt="x" * 600)


async def test_tokenize_is_what_a_completion_counts(raw: httpx.AsyncClient) -> None:
    chat = {"model": "sim", "messages": HELLO}
    tokens = (await raw.post("/tokenize", json=chat)).json()
    used = (await raw.post("/v1/chat/completions", json=chat)).json()["usage"]
    assert tokens["count"] == len(tokens["tokens"]) == used["prompt_tokens"]
    assert (await raw.post("/tokenize", json={"prompt": "ab"})).json()["tokens"] == [97, 98]


async def test_metrics_parse_and_count(raw: httpx.AsyncClient) -> None:
    body = {"model": "sim", "prompt": "x" * 40, "max_tokens": 2}
    for _ in range(2):
        await raw.post("/v1/completions", json=body)
    families = text_string_to_metric_families((await raw.get("/metrics")).text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values["vllm:prefix_cache_queries_total"] == 80
    assert values["vllm:prefix_cache_hits_total"] == 32
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0
    assert values["process_start_time_seconds"] > 1e9


async def test_reset_forgets_the_cache(raw: httpx.AsyncClient, engine: SimEngine) -> None:
    await raw.post("/v1/completions", json={"model": "sim", "prompt": "x" * 40})
    assert engine.app.cache.held()
    assert (await raw.post("/reset_prefix_cache")).status_code == 200
    assert not engine.app.cache.held()


async def test_requests_are_kept_byte_for_byte(raw: httpx.AsyncClient, engine: SimEngine) -> None:
    body = b'{ "model":"sim",  "prompt" : "\\u00fc" , "unknown": [1.0, 1e2] }'
    await raw.post("/v1/completions", content=body, headers={"X-Thing": "one"})
    assert engine.app.requests[-1].body == body
    assert engine.app.requests[-1].header("x-thing") == "one"


async def test_speeds_and_places_follow_the_clock() -> None:
    clock = HandClock()
    config = SimConfig(prefill_rate=100.0, decode_rate=10.0, max_num_seqs=1)
    async with fleet(1, config=config, clock=clock, events=False) as (engine,):
        counters = engine.app.queue.counters
        async with httpx.AsyncClient(base_url=engine.url) as raw:
            ask = {"model": "sim", "prompt": "x" * 50, "max_tokens": 2}
            posts = [asyncio.create_task(raw.post("/v1/completions", json=ask)) for _ in range(2)]
            await eventually(lambda: (counters.running, counters.waiting) == (1, 1))
            await clock.advance(0.49)
            assert engine.app.cache.held() == {}
            await clock.advance(0.01)  # 50 tokens at 100 a second
            await eventually(lambda: clock.sleepers == 1)
            assert engine.app.cache.held()
            await clock.advance(0.1)
            await eventually(lambda: clock.sleepers == 1)
            await clock.advance(0.1)
            await eventually(lambda: posts[0].done() or posts[1].done())
            await eventually(lambda: clock.sleepers == 1)
            await clock.advance(0.02)  # the second one has 48 of its 50 tokens cached
            await eventually(lambda: clock.sleepers == 1)
            await clock.advance(0.2)
            await eventually(lambda: all(post.done() for post in posts) or clock.sleepers)
            await clock.advance(0.2)
            done = [(await post).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for post in posts]
            assert sorted(done) == [0, 48]


async def test_an_abandoned_request_is_aborted() -> None:
    async with fleet(1, config=SimConfig(decode_rate=1.0), events=False) as (engine,):
        counters = engine.app.queue.counters
        async with httpx.AsyncClient(base_url=engine.url) as raw:
            body = {"model": "sim", "prompt": "x", "stream": True}
            async with raw.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                await eventually(lambda: counters.running == 1)
        await eventually(lambda: counters.running == 0)
        assert counters.aborted == 1
        assert engine.app.cache.usage == 0


async def test_pipelined_and_split_requests_are_answered_in_order(engine: SimEngine) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    for i in range(3):
        body = json.dumps({"model": "sim", "prompt": "x" * (i + 1), "max_tokens": 1}).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )
        writer.write(request[:30])
        await writer.drain()
        writer.write(request[30:])
    counts = []
    for _ in range(3):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        counts.append(json.loads(await reader.readexactly(length))["usage"]["prompt_tokens"])
    writer.close()
    assert counts == [1, 2, 3]


def test_a_threaded_engine_serves_callers_without_a_loop() -> None:
    with ThreadedSim() as sim:
        answer = httpx.post(f"{sim.url}/v1/completions", json={"model": "sim", "prompt": "x" * 40})
        assert answer.json()["usage"]["completion_tokens"] == 17  # sixteen and the eos
        assert sim.call(lambda: sim.engine.app.cache.match([120] * 40)) == 32


async def test_fast_mode_answers_without_looking() -> None:
    async with SimEngine(SimConfig(fast=True)) as engine:
        async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="sim", messages=HELLO)
            assert whole.choices[0].message.content == "fast"
            stream = await client.chat.completions.create(
                model="sim",
                messages=HELLO,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        assert len(chunks) == 17
        assert chunks[-1].usage is not None
        assert chunks[-2].choices[0].finish_reason == "stop"


def test_only_loopback_is_listened_on() -> None:
    with pytest.raises(ValueError, match="loopback"):
        SimConfig(host="0.0.0.0")


# -- tokenizers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    return FolderTokenizer(str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))


def test_the_tiny_model_is_written_the_same_each_time(tmp_path: Path) -> None:
    first, second = write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b")
    names = sorted(path.name for path in first.iterdir())
    assert [(first / name).read_bytes() for name in names] == [(second / name).read_bytes() for name in names]


@pytest.mark.parametrize(
    "text", ["", "The river keeps time.", "ünïcode 漢字 🎈\n\t", "a<|im_end|>b", '{"a": [1]}']
)
def test_text_survives_tokenizers(tiny: FolderTokenizer, text: str) -> None:
    for tokenizer in (tiny, ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text.replace("<|im_end|>", "")


def test_the_tiny_template_knows_systems_tools_and_calls(tiny: FolderTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at":  "é"}'}}
    text = tiny.render(
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                },
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "a bird"},
            ],
            "tools": [{"type": "function", "function": {"name": "look"}}],
        }
    )
    assert "Be kind." in text
    assert "<|im_start|>user\none\ntwo<|im_end|>" in text
    assert '<tool_call>look {"at": "é"}</tool_call>' in text
    assert text.endswith("<|im_start|>assistant\n")


async def test_the_next_turn_finds_the_last_answer_cached(tiny: FolderTokenizer) -> None:
    async with fleet(1, config=SimConfig(block_size=4), tokenizer=tiny, events=False) as (engine,):
        async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
            first = await client.chat.completions.create(model="sim", messages=HELLO)
            assert first.usage is not None
            said = {"role": "assistant", "content": first.choices[0].message.content}
            more: Any = [*HELLO, said, {"role": "user", "content": "and then"}]
            second = await client.chat.completions.create(model="sim", messages=more)
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        computed = first.usage.prompt_tokens + first.usage.completion_tokens - 1
        assert second.usage.prompt_tokens_details.cached_tokens == computed // 4 * 4
