"""Engines that die, hang and lie: nothing is repeated, nothing hangs, every lease comes back."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gateway import config
from gateway.http import Protocol
from loadtest.harness import eventually

LONG = "The river bends twice before the mill, and the old road follows it as far as the bridge. " * 12


def idle(stack: Any) -> bool:
    """Every lease has been given back, and the books agree."""
    workers = stack.gateway.workers.all()
    for worker in workers:
        worker.check_integrity()
    return not any(worker.running or worker.queued_tokens for worker in workers)


async def conserved(stack: Any) -> bool:
    ended = await stack.metric("hotprefix_requests_ended_total")
    flying = await stack.metric("hotprefix_requests_in_flight")
    return await stack.metric("hotprefix_requests_total") == ended + flying


async def test_engine_killed_before_the_first_byte_is_served_by_the_other(start: Any) -> None:
    async with start(2) as stack:
        owner = (await stack.chat(LONG)).headers["x-hotprefix-worker"]
        await stack.settled()
        stack.engine(owner).set_faults(die_at_once=True)
        for stream in (False, True):
            answer = await stack.chat(LONG, stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-hotprefix-worker"] != owner
        assert await stack.metric("hotprefix_retries_total") == 2
        assert idle(stack)
        assert await conserved(stack)


async def test_a_stream_with_a_head_but_no_event_is_planned_again(start: Any) -> None:
    async with start(2) as stack:
        for engine in stack.engines:
            engine.set_faults(die_after=0)
        stack.engines[1].clear_faults()
        for _ in range(4):
            answer = await stack.chat("hello", stream=True)
            assert answer.status_code == 200
            assert answer.headers["x-hotprefix-worker"] == "w1"
            assert "[DONE]" in answer.text


async def test_engine_killed_mid_stream_ends_with_an_error_event(start: Any) -> None:
    async with start(2) as stack:
        whole = await stack.chat("tell me", stream=True, max_tokens=8)
        texts = [json.loads(x[6:]) for x in whole.text.splitlines() if x.startswith("data: {")]
        good = "".join(e["choices"][0]["delta"].get("content") or "" for e in texts)
        for tokens in range(1, 8):
            for engine in stack.engines:
                engine.set_faults(die_after=tokens)
            answer = await stack.chat("tell me", stream=True, max_tokens=8)
            lines = [x for x in answer.text.splitlines() if x.startswith("data: ")]
            error = json.loads(lines[-1][6:])["error"]
            assert error["type"] == "server_error"
            assert "[DONE]" not in answer.text
            said = "".join(json.loads(x[6:])["choices"][0]["delta"].get("content") or "" for x in lines[:-1])
            assert good.startswith(said)
            assert said != good
        assert await stack.metric("hotprefix_retries_total") == 0
        assert await stack.metric("hotprefix_requests_ended_total", outcome="broken_stream") == 7
        assert idle(stack)


async def test_all_engines_failing_gives_an_openai_error(start: Any) -> None:
    async with start(2) as stack:
        for engine in stack.engines:
            engine.set_faults(fail_next=10)
        answer = await stack.chat("x")
        assert answer.status_code == 502
        error = answer.json()["error"]
        assert error["code"] == "upstream_failed"
        assert "127.0.0.1" not in error["message"]
        assert answer.headers["retry-after"]


async def test_retries_are_bounded_by_the_budget(start: Any) -> None:
    async with start(2, upstream={"retry_floor": 0.0, "retry_share": 0.1}) as stack:
        for engine in stack.engines:
            engine.set_faults(fail_next=10_000)
        for _ in range(60):
            assert (await stack.chat("x")).status_code == 502
        asked = len(stack.requests())
        assert asked <= 60 + 10 + 6, f"{asked} attempts for 60 requests"


async def test_zero_workers_is_503_with_retry_after(start: Any) -> None:
    async with start(1) as stack:
        await stack.engines[0].stop()
        await eventually(lambda: not stack.gateway.workers.serving(None))
        answer = await stack.chat("x")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "no_worker"
        assert (await stack.client.get("/ready")).status_code == 503
        assert (await stack.client.get("/health")).status_code == 200
        await stack.engines[0].start()
        await eventually(lambda: stack.gateway.workers.serving(None))
        assert (await stack.chat("x")).status_code == 200


@pytest.mark.parametrize("seq", ["zero", "continue"])
async def test_restart_on_the_same_port_forgets_old_entries(start: Any, seq: str) -> None:
    async with start(2) as stack:
        owner = (await stack.chat(LONG)).headers["x-hotprefix-worker"]
        await stack.settled()
        epochs = stack.gateway.hub.status(owner).epochs
        await stack.engine(owner).restart(seq)
        await eventually(lambda: stack.gateway.hub.status(owner).epochs > epochs, deadline=2)
        await eventually(lambda: not stack.gateway.index.stats().entries, deadline=1)
        await eventually(lambda: len(stack.gateway.workers.serving(None)) == 2)
        again = await stack.chat(LONG)
        assert again.status_code == 200
        assert again.headers["x-hotprefix-matched-tokens"] == "0"


async def test_hung_engine_hurts_only_its_own_requests_and_those_move(start: Any) -> None:
    async with start(2, health={"interval_s": 0.05, "timeout_s": 0.2, "failures": 2}) as stack:
        owner = (await stack.chat(LONG)).headers["x-hotprefix-worker"]
        await stack.settled()
        engine = stack.engine(owner)
        engine.set_faults(hang=True, unhealthy=True)
        answer = await asyncio.wait_for(stack.chat(LONG), 10)
        assert answer.status_code == 200
        assert answer.headers["x-hotprefix-worker"] != owner
        assert idle(stack)


async def test_hang_in_the_middle_of_a_stream_ends_with_an_error(start: Any) -> None:
    async with start(1, upstream={"idle_s": 0.2}) as stack:
        stack.engines[0].set_faults(hang_after=2)
        answer = await asyncio.wait_for(stack.chat("x", stream=True, max_tokens=8), 10)
        assert "error" in answer.text.splitlines()[-2]
        assert idle(stack)


async def test_client_gone_aborts_the_engine(start: Any) -> None:
    async with start(1) as stack:
        engine = stack.engines[0]
        for stream in (True, False):
            engine.set_faults(hang_after=1 if stream else None, hang=not stream)
            with_client = httpx.AsyncClient(base_url=stack.url, trust_env=False)
            body = {"model": "sim", "prompt": "x", "max_tokens": 8, "stream": stream}
            before = len(stack.requests())
            asking = asyncio.create_task(with_client.post("/v1/completions", json=body))
            await eventually(lambda before=before: len(stack.requests()) > before)
            await eventually(lambda: not idle(stack))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await with_client.aclose()
            await eventually(lambda: idle(stack))
        await eventually(
            lambda: not engine.app.queue.counters.running, what="the engine dropped the requests"
        )
        gone = await stack.metric("hotprefix_requests_ended_total", outcome="client_gone")
        assert gone == 2
        assert await conserved(stack)


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    cut: list[str] = []
    protocol = Protocol.__new__(Protocol)  # only the parts that decide this
    protocol.loop, protocol._limits = asyncio.get_running_loop(), config.Limits(write_s=0.01)
    protocol._patience, protocol.flow = None, SimpleNamespace(pause_writing=int, resume_writing=int)
    protocol.transport = SimpleNamespace(abort=lambda: cut.append("cut"))
    protocol.pause_writing()
    protocol.resume_writing()
    assert protocol._patience is None
    protocol.pause_writing()
    await eventually(lambda: cut)


async def test_several_answers_are_not_judged(start: Any) -> None:
    async with start(1) as stack:
        await stack.chat(LONG, n=2)
        assert await stack.metric("hotprefix_predictions_total", cause="several") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_pipelining_does_not_hide_that_a_client_left(start: Any, stream: bool) -> None:
    async with start(1) as stack:
        stack.engines[0].set_faults(hang_after=1 if stream else None, hang=not stream)
        host, port = stack.url.removeprefix("http://").split(":")
        body = json.dumps({"model": "sim", "prompt": "x", "max_tokens": 8, "stream": stream}).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        await eventually(lambda: stack.requests() and not idle(stack))
        writer.close()
        await eventually(lambda: idle(stack))
        assert await stack.metric("hotprefix_requests_ended_total", outcome="client_gone") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_ends_what_outlives_its_grace(start: Any, stream: bool) -> None:
    async with start(1, grace_s=0.2) as stack:
        stack.engines[0].set_faults(hang_after=1 if stream else None, hang=not stream)
        asking = asyncio.create_task(stack.chat("x", stream=stream))
        await eventually(lambda: stack.requests() and not idle(stack))
        stack.stop.set()
        answer = await asyncio.wait_for(asking, 10)
        if stream:
            assert json.loads(answer.text.strip().splitlines()[-1][6:])["error"]["code"] == "stopping"
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "stopping"
        await eventually(lambda: idle(stack))
        assert await stack.metric("hotprefix_requests_ended_total", outcome="stopped") == 1


async def test_malformed_sse_is_passed_on_without_harm(start: Any) -> None:
    async with start(1) as stack:
        stack.engines[0].set_faults(malformed_sse=True)
        answer = await stack.chat("x", stream=True)
        assert answer.status_code == 200
        assert idle(stack)


async def test_many_clients_leaving_at_random_leak_nothing(start: Any) -> None:
    async with start(2, engine={"prefill_rate": 20_000.0, "decode_rate": 400.0}) as stack:

        async def ask(number: int) -> None:
            body = {"model": "sim", "prompt": f"{number} " + LONG, "max_tokens": 8, "stream": number % 2 == 0}
            try:
                async with asyncio.timeout((number % 17) / 100):
                    await stack.client.post("/v1/completions", json=body)
            except TimeoutError:
                return

        for wave in range(10):
            await asyncio.gather(*(ask(wave * 20 + n) for n in range(20)))
        await eventually(lambda: idle(stack), deadline=20)
        assert await conserved(stack)
        assert await stack.metric("hotprefix_requests_in_flight") == 0
        assert await stack.metric("hotprefix_requests_ended_total", outcome="crashed") == 0
