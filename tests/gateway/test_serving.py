"""Requests through a whole gateway: what reaches the engine, what reaches the client."""

import json
from typing import Any

import openai
import pytest

from loadtest.harness import eventually

LONG = "The river bends twice before the mill, and the old road follows it as far as the bridge. " * 12


async def test_second_turn_goes_where_the_first_was(start: Any) -> None:
    async with start(3) as stack:
        workers = set()
        for topic in ("alpha", "beta", "gamma", "delta"):
            first = await stack.chat(topic + LONG)
            assert first.status_code == 200
            await stack.settled()
            second = await stack.chat(topic + LONG + "And then?")
            assert second.headers["x-hotprefix-worker"] == first.headers["x-hotprefix-worker"]
            cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 500
            assert abs(int(second.headers["x-hotprefix-matched-tokens"]) - cached) <= 16
            workers.add(first.headers["x-hotprefix-worker"])
        assert len(workers) > 1, "cold prompts spread"
        assert await stack.metric("hotprefix_predictions_total", cause="match") == 8
        assert await stack.metric("hotprefix_predictions_total") == 8


async def test_body_bytes_are_forwarded_untouched(start: Any) -> None:
    body = b'{ "model":"sim" , "messages":[{"role":"user","content":"h\\u00e9llo  \\ud83d\\ude00"}], "x": 1.0e2,"y":12345678901234567890 }'
    async with start(1) as stack:
        answer = await stack.client.post("/v1/chat/completions", content=body)
        assert answer.status_code == 200
        assert stack.requests()[-1].body == body


async def test_stream_usage_is_asked_for_and_taken_out_again(start: Any) -> None:
    async with start(1) as stack:
        answer = await stack.chat("hello there", stream=True)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert all(event["choices"] for event in events)
        assert json.loads(stack.requests()[-1].body)["stream_options"] == {"include_usage": True}
        assert await stack.metric("hotprefix_prompt_tokens_total") > 0

        asked = await stack.chat("hello there", stream=True, stream_options={"include_usage": True})
        events = [json.loads(line[6:]) for line in asked.text.splitlines() if line.startswith("data: {")]
        assert [event for event in events if event.get("usage")][-1]["choices"] == []


@pytest.mark.parametrize(
    "prompt", ["one", ["one", "two"], [1, 2, 3], [[1, 2, 3], [4, 5]]], ids=["text", "texts", "ids", "lists"]
)
async def test_completions_take_every_form_of_prompt(start: Any, prompt: Any) -> None:
    async with start(2) as stack:
        answer = await stack.client.post(
            "/v1/completions", json={"model": "sim", "prompt": prompt, "max_tokens": 3}
        )
        assert answer.status_code == 200, answer.text
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert len(answer.json()["choices"]) == (2 if several else 1)


async def test_the_official_client_works_unmodified(start: Any) -> None:
    async with start(2) as stack, openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none") as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["sim"]
        stream = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=5
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        whole = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )
        assert "".join(parts) == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="sim"):
            await client.completions.create(model="gpt-9", prompt="x")


async def test_upstream_4xx_passes_unchanged_and_is_not_retried(start: Any) -> None:
    async with start(2) as stack:
        direct = await stack.client.post(
            stack.engines[0].url + "/v1/completions", json={"model": "sim", "prompt": "x", "max_tokens": -1}
        )
        assert direct.status_code == 400
        before = len(stack.requests())
        answer = await stack.client.post(
            "/v1/completions", json={"model": "sim", "prompt": "x", "max_tokens": -1}
        )
        assert (answer.status_code, answer.content) == (400, direct.content)
        assert len(stack.requests()) == before + 1


async def test_models_health_ready_and_metrics(start: Any) -> None:
    async with start(2) as stack:
        assert (await stack.client.get("/health")).status_code == 200
        assert (await stack.client.get("/ready")).json() == {"ready": True, "workers": 2}
        await stack.chat("x")
        text = (await stack.client.get("/metrics")).text
        assert "hotprefix_requests_total 1.0" in text
        workers = (await stack.client.get(stack.admin_url + "/v1/workers")).json()["workers"]
        assert [worker["events"]["trust"] for worker in workers] == ["exact", "exact"]


async def test_not_ready_until_tokenizers_are_there_or_known_to_fail(start: Any) -> None:
    async with start(1, ready=False) as stack:
        ready = await stack.client.get("/ready")
        assert ready.status_code == (200 if stack.gateway.tokenizers.settled("sim") else 503)
        await eventually(lambda: stack.gateway.tokenizers.settled("sim"))
        assert (await stack.client.get("/ready")).status_code == 200
    async with start(1, ready=False, tokens={"tokenizers": {"sim": "/nowhere/at/all"}}) as stack:
        await eventually(lambda: stack.gateway.tokenizers.settled("sim"))
        assert (await stack.client.get("/ready")).status_code == 200, "serves by text"
        workers = (await stack.client.get(stack.admin_url + "/v1/workers")).json()["workers"]
        assert "nowhere" in workers[0]["tokenizer"]
        assert (await stack.chat("x")).status_code == 200
        assert await stack.metric("hotprefix_prompts_inexact_total", reason="no_tokenizer") == 1


async def test_request_ids_are_kept_or_made(start: Any) -> None:
    async with start(1) as stack:
        given = await stack.client.post(
            "/v1/completions", json={"model": "sim", "prompt": "x"}, headers={"x-request-id": "abc-1"}
        )
        assert given.headers["x-request-id"] == "abc-1"
        assert dict(stack.requests()[-1].headers)["x-request-id"] == "abc-1"
        made = await stack.chat("x")
        assert len(made.headers["x-request-id"]) == 32
