"""Hostile and broken requests: an error in OpenAI's form, and the gateway lives."""

import asyncio
import json
from typing import Any

import pytest

from gateway.workers import parse_models
from loadtest.harness import eventually

BAD: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("cut", b'{"model":"sim","messages":['),
    ("no object", b"[1,2]"),
    ("number", b"7"),
    ("invalid utf-8", b'{"model":"sim","messages":[{"role":"user","content":"\xff\xfe"}]}'),
    ("invalid utf-8 in a key", b'{"model":"sim","messages":[],"a\xff":1}'),
    ("messages no list", b'{"model":"sim","messages":"hi"}'),
    ("messages missing", b'{"model":"sim"}'),
    ("message no object", b'{"model":"sim","messages":["hi"]}'),
    ("model a number", b'{"model":5,"messages":[]}'),
    ("stream a string", b'{"model":"sim","messages":[],"stream":"yes"}'),
    ("nested", b'{"model":"sim","messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    ("NaN", b'{"model":"sim","messages":[],"temperature":NaN}'),
    ("huge number", b'{"model":"sim","messages":[],"max_tokens":' + b"9" * 5000 + b"}"),
    ("stream options", b'{"model":"sim","messages":[],"stream":true,"stream_options":[1]}'),
]


@pytest.mark.parametrize("body", [body for _, body in BAD], ids=[name for name, _ in BAD])
async def test_bad_bodies_are_400_in_openai_form(start: Any, body: bytes) -> None:
    async with start(1, events=False) as stack:
        answer = await stack.client.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (await stack.chat("still here")).status_code == 200


async def test_lone_surrogates_do_no_harm(start: Any) -> None:
    async with start(1) as stack:
        body = b'{"model":"sim","messages":[{"role":"user","content":"\\ud800 x"}]}'
        answer = await stack.client.post("/v1/chat/completions", content=body)
        assert answer.status_code in (200, 400)
        assert stack.gateway.metrics.text()
        assert await stack.metric("hotprefix_requests_ended_total", outcome="crashed") == 0


async def test_unknown_model_is_404_and_lists_the_known(start: Any) -> None:
    async with start(1) as stack:
        answer = await stack.chat("x", model="gpt-9")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "sim" in error["message"]


async def test_a_model_whose_workers_are_down_is_not_unknown(start: Any) -> None:
    async with start(2) as stack:
        workers = stack.gateway.workers
        first, second = workers.all()
        workers.passed(first, parse_models({"data": [{"id": "other"}]}, first.served.started))
        await stack.engines[1].stop()
        await eventually(lambda: not second.up)
        answer = await stack.chat("x")
        assert answer.status_code in (200, 503), "not 404: it comes back"


async def test_bodies_above_the_limit_are_413(start: Any) -> None:
    async with start(1, limits={"body_bytes": 2000}) as stack:
        answer = await stack.chat("x" * 3000)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"

        async def drip() -> Any:
            for _ in range(10):
                yield b"x" * 1000

        answer = await stack.client.post("/v1/chat/completions", content=drip())
        assert answer.status_code == 413


async def test_ten_megabytes_are_refused_by_default(start: Any) -> None:
    async with start(1, events=False) as stack:
        answer = await stack.chat("x" * 10_000_000)
        assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("POST", "//v1/chat/completions", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
    ],
)
async def test_the_frameworks_own_errors_are_in_openai_form(
    start: Any, method: str, path: str, status: int
) -> None:
    async with start(1, events=False) as stack:
        answer = await stack.client.request(method, stack.url + path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_fields_that_steer_the_kv_connector_are_removed(start: Any) -> None:
    steering = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "token_ids": [1, 2, 3]}
    async with start(1) as stack:
        await stack.chat(
            "x", kv_transfer_params=steering, vllm_xargs={"kv_source": "evil", "other": 1}, top_k=3
        )
        seen = json.loads(stack.requests()[-1].body)
        assert not {"kv_transfer_params", "ec_transfer_params"} & set(seen)
        assert seen["vllm_xargs"] == {"other": 1}
        assert seen["top_k"] == 3
        escaped = (
            b'{"model":"sim","messages":[{"role":"user","content":"x"}],"kv_\\u0074ransfer_params":{"a":1}}'
        )
        await stack.client.post("/v1/chat/completions", content=escaped)
        assert "kv_transfer_params" not in json.loads(stack.requests()[-1].body)
        twice = (
            b'{"kv_transfer_params":null,"model":"sim","messages":[{"role":"user","content":"x"}],'
            b'"kv_transfer_params":{"a":1}}'
        )
        await stack.client.post("/v1/chat/completions", content=twice)
        assert b"kv_transfer_params" not in stack.requests()[-1].body


async def test_credentials_and_hop_headers_never_reach_the_engine(start: Any) -> None:
    async with start(1) as stack:
        await stack.client.post(
            "/v1/completions",
            json={"model": "sim", "prompt": "x"},
            headers={
                "authorization": "Bearer secret",
                "cookie": "a=b",
                "x-forwarded-for": "1.2.3.4",
                "x-data-parallel-rank": "3",
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            },
        )
        seen = {name.lower() for name, _ in stack.requests()[-1].headers}
        assert not seen & {"authorization", "cookie", "x-forwarded-for", "x-data-parallel-rank"}
        assert "traceparent" in seen


async def test_an_upgrade_is_ignored_and_the_body_read(start: Any) -> None:
    async with start(1) as stack:
        for kind in ("h2c", "websocket"):
            answer = await stack.client.post(
                "/v1/completions",
                json={"model": "sim", "prompt": "x", "max_tokens": 2},
                headers={
                    "connection": "Upgrade, HTTP2-Settings",
                    "upgrade": kind,
                    "http2-settings": "AAMAAABk",
                },
            )
            assert answer.status_code == 200, answer.text


async def test_no_redirects_to_wherever_the_client_says(start: Any) -> None:
    async with start(1, events=False) as stack:
        answer = await stack.client.get("/v1/models/", headers={"host": "evil"})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{}] * 20_000}),
        ("/v1/chat/completions", {"messages": [], "tools": [{}] * 5000}),
        ("/v1/chat/completions", {"messages": [], "documents": [{}] * 5000}),
        ("/v1/completions", {"prompt": [[1]] * 2000}),
    ],
)
async def test_counts_are_bounded(start: Any, path: str, body: dict[str, Any]) -> None:
    async with start(1, events=False) as stack:
        answer = await stack.client.post(path, json={"model": "sim", **body})
        assert answer.status_code == 400
        assert "At most" in answer.json()["error"]["message"]


RAW: list[tuple[str, bytes, int]] = [
    ("garbage", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    ("two hosts", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    ("no host", b"GET /health HTTP/1.1\r\n\r\n", 400),
    ("length and chunked", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"
     b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("two lengths", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    ("two keys", b"GET /health HTTP/1.1\r\nHost: a\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n", 400),
    ("gzipped", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    ("many headers", b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(300)) + b"\r\n", 431),
    ("long header", b"GET /health HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", 431),
    ("endless header", b"GET /health HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 100_000, 431),
]  # fmt: skip


@pytest.mark.parametrize(("data", "status"), [row[1:] for row in RAW], ids=[row[0] for row in RAW])
async def test_raw_requests_no_client_sends(start: Any, data: bytes, status: int) -> None:
    async with start(1, events=False) as stack:
        host, port = stack.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:80]
        assert b'{"error":{' in answer
        assert not stack.requests()


async def test_heads_and_bodies_that_never_end_are_given_up(start: Any) -> None:
    limits = {"head_s": 0.2, "body_s": 0.2}
    async with start(1, events=False, limits=limits) as stack:
        host, port = stack.url.removeprefix("http://").split(":")
        for data in (
            b"",
            b"GET /health HTTP/1.1\r\nHost",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            answer = await asyncio.wait_for(reader.read(), 10)
            assert not data or b" 408 " in answer.split(b"\r\n")[0]
            writer.close()
        assert (await stack.client.get("/health")).status_code == 200


async def test_too_many_requests_in_flight_are_503(start: Any) -> None:
    async with start(1, limits={"requests": 2}) as stack:
        stack.engines[0].set_faults(hang=True)
        waiting = [asyncio.create_task(stack.chat("x")) for _ in range(2)]
        await eventually(lambda: stack.gateway.workers.get("w0").running == 2)
        answer = await stack.chat("x")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
