"""Each fault of the simulated engine's answers, thrown by method and by the control endpoint."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from loadtest.harness import ProcessSim, eventually, fleet, wait_until
from loadtest.sim.clock import HandClock
from loadtest.sim.config import SimConfig
from loadtest.simengine import SimEngine, parse_config

BODY = {"model": "sim", "prompt": "x" * 40, "max_tokens": 8}
STREAM = {**BODY, "stream": True}


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with SimEngine() as started:
        yield started
        assert started.errors == 0
        started.app.cache.check_integrity()


@pytest.fixture
async def raw(engine: SimEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=10) as ready:
        yield ready


async def lines(client: httpx.AsyncClient, into: list[str]) -> None:
    """Read a stream's data lines until it ends or breaks."""
    async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
        async for line in answer.aiter_lines():
            if line:
                into.append(line)


async def test_a_hanging_engine_accepts_and_says_nothing(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    engine.set_faults(hang=True)
    post = asyncio.create_task(raw.post("/v1/completions", json=BODY))
    await eventually(lambda: engine.app.requests)
    assert (await raw.get("/health")).status_code == 200
    assert not post.done()
    post.cancel()


async def test_a_stream_hangs_after_its_tokens(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    engine.set_faults(hang_after=3)
    seen: list[str] = []
    read = asyncio.create_task(lines(raw, seen))
    await eventually(lambda: len(seen) == 3)
    assert engine.app.queue.counters.running == 1
    assert not read.done()
    read.cancel()
    await eventually(lambda: engine.app.queue.counters.running == 0)


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_the_connection_is_cut_after_tokens(
    engine: SimEngine, raw: httpx.AsyncClient, tokens: int
) -> None:
    engine.set_faults(die_after=tokens)
    seen: list[str] = []
    with pytest.raises(httpx.TransportError):
        await lines(raw, seen)
    assert len(seen) <= tokens  # a reset may overtake the last bytes
    with pytest.raises(httpx.TransportError):
        await raw.post("/v1/completions", json=BODY)
    engine.clear_faults()
    assert (await raw.post("/v1/completions", json=BODY)).status_code == 200


async def test_the_connection_is_cut_before_the_first_byte(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    engine.set_faults(die_at_once=True)
    for body in (BODY, STREAM):
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await raw.post("/v1/completions", json=body)
    assert engine.app.queue.counters.prompt_tokens == 0


async def test_the_next_requests_fail_and_then_no_more(raw: httpx.AsyncClient, engine: SimEngine) -> None:
    engine.set_faults(fail_next=2, fail_status=503)
    answers = [await raw.post("/v1/completions", json=BODY) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    assert answers[0].json()["error"]["code"] == 503


async def test_a_slow_engine_waits_before_the_first_byte() -> None:
    clock = HandClock()
    async with fleet(1, clock=clock, events=False) as (engine,):
        engine.set_faults(slow=3.0)
        async with httpx.AsyncClient(base_url=engine.url) as raw:
            post = asyncio.create_task(raw.post("/v1/completions", json=BODY))
            await eventually(lambda: clock.sleepers == 1)
            await clock.advance(2.9)
            assert not engine.app.queue.counters.prompt_tokens
            await clock.advance(0.1)
            assert (await post).status_code == 200


async def test_health_fails_while_requests_are_served(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    engine.set_faults(unhealthy=True)
    assert (await raw.get("/health")).status_code == 503
    assert (await raw.post("/v1/completions", json=BODY)).status_code == 200


async def test_malformed_events_are_no_json(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    engine.set_faults(malformed_sse=True)
    seen: list[str] = []
    await lines(raw, seen)
    assert seen[-1] == "data: [DONE]"
    for line in seen[:-1]:
        with pytest.raises(json.JSONDecodeError):
            json.loads(line.removeprefix("data: "))


async def test_an_exiting_engine_is_gone_and_can_come_back(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    engine.set_faults(exit_after=2)
    seen: list[str] = []
    with pytest.raises(httpx.TransportError):
        await lines(raw, seen)
    await eventually(lambda: not engine.alive)
    with pytest.raises(httpx.ConnectError):
        await raw.get("/health")
    engine.clear_faults()
    await engine.restart()
    assert (await raw.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_restart_cuts_running_requests(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    engine.set_faults(hang_after=1)
    read = asyncio.create_task(lines(raw, []))
    await eventually(lambda: engine.app.queue.counters.running == 1)
    await engine.restart()
    with pytest.raises(httpx.TransportError):
        await read
    assert engine.app.queue.counters.running == 0


async def test_switches_can_be_thrown_over_http(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    answer = await raw.post("/sim/faults", json={"fail_next": 1, "seed": 3})
    assert answer.json()["fail_next"] == 1
    assert (await raw.post("/v1/completions", json=BODY)).status_code == 500
    assert (await raw.get("/sim/faults")).json()["fail_next"] == 0
    for wrong in ({"no_such": 1}, {"hang": "yes"}):
        assert (await raw.post("/sim/faults", json=wrong)).status_code == 400
    with pytest.raises(msgspec.ValidationError):
        engine.set_faults(no_such=1)


async def test_truth_requests_and_stats_can_be_read_over_http(
    engine: SimEngine, raw: httpx.AsyncClient
) -> None:
    await raw.post("/v1/completions", json={**BODY, "cache_salt": "s"})
    (space,) = (await raw.get("/sim/truth")).json()
    assert (space["adapter"], space["salt"]) == ("", "s")
    assert [len(prefix) for prefix in space["prefixes"]] == [16, 32]
    (request,) = (await raw.get("/sim/requests")).json()
    assert request["path"] == "/v1/completions"
    assert (await raw.get("/sim/stats")).json()["finished"] == 1
    assert (await raw.get("/sim/nothing")).status_code == 404


async def test_a_restart_over_http(engine: SimEngine, raw: httpx.AsyncClient) -> None:
    life = engine.app
    assert (await raw.post("/sim/restart", json={"seq": "sideways"})).status_code == 400
    assert (await raw.post("/sim/restart", json={"seq": "zero"})).status_code == 200
    await eventually(lambda: engine.app is not life and engine.alive)
    assert (await raw.get("/health")).status_code == 200


def test_a_process_says_where_it_is_and_ends_when_asked() -> None:
    with ProcessSim("--model", "m", "--output-tokens", "4") as sim:
        answer = httpx.post(f"{sim.url}/v1/completions", json={"model": "m", "prompt": "x"})
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert sim.ready.pid == sim.pid
        sim.stop()
        assert sim.wait() == 0


def test_a_process_dies_mid_stream_when_told_to() -> None:
    with ProcessSim() as sim:
        httpx.post(f"{sim.url}/sim/faults", json={"exit_after": 2})
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{sim.url}/v1/completions", json=STREAM)
        assert sim.wait() == 1


def test_a_killed_process_leaves_its_port() -> None:
    with ProcessSim() as sim:
        port = sim.url.rpartition(":")[2]
        sim.kill()
        with ProcessSim("--port", port) as again:
            assert again.url == sim.url
            wait_until(lambda: httpx.get(f"{again.url}/health").status_code == 200)


def test_every_field_is_a_flag() -> None:
    config = parse_config(
        ["--port", "1", "--adapter", "a=/x", "--prefill-rate", "2000", "--dev-mode", "--encoding", "array"]
    )
    assert config == SimConfig(
        port=1, adapters={"a": "/x"}, prefill_rate=2000.0, dev_mode=True, encoding="array"
    )
    for wrong in (["--encoding", "xml"], ["--host", "0.0.0.0"], ["--no-such"]):
        with pytest.raises(SystemExit):
            parse_config(wrong)
