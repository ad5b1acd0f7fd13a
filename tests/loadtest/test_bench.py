"""The form of results, the bodies that never repeat, the load generator, and one short real run."""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter

import httpx
import msgspec
import pytest

from loadtest import bench_gateway, report
from loadtest.bench_gateway import ALONE, Window, cpu_seconds, figures, parse
from loadtest.bodies import GROUPS, SIZES, Bodies
from loadtest.generator import Generator, Plan, Result
from loadtest.harness import fleet
from loadtest.sim.config import SimConfig

# -- report -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "op", "limit", "holds"),
    [
        (0.4, "<=", 0.5, True),
        (0.5, "<=", 0.5, True),
        (0.6, "<=", 0.5, False),
        (1.0, ">=", 0.97, True),
        (2, "==", 3, False),
    ],
)
def test_a_claim_is_held_against_its_limit(value: float, op: report.Op, limit: float, holds: bool) -> None:
    result = report.report([report.claim("a.b", value, op, limit)], {}, runs=5)
    assert result["claims"] == [{"name": "a.b", "value": value, "op": op, "limit": limit, "holds": holds}]
    assert report.exit_status(result) == (0 if holds else 1)


def test_what_could_not_be_measured_is_said_and_fails_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    result = report.report([report.unmeasured("peer.ratio", "<=", 1.0, "no such wheel")], {}, runs=0)
    assert report.show(result, "title", as_json=True) == 0
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["value"], claim["holds"], claim["reason"]) == (None, None, "no such wheel")
    assert report.show(result, "title", as_json=False) == 0
    assert "not measured" in capsys.readouterr().out


def test_a_result_says_where_and_of_what_it_is() -> None:
    result = report.report([], {"x": 1.0}, runs=3)
    assert result.keys() == {"claims", "figures", "runs", "machine", "commit"}
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["python"] == sys.version.split()[0]


def test_figures_of_several_arms_make_columns(capsys: pytest.CaptureFixture[str]) -> None:
    result = report.report([], {"cpu": {"a": 1.5, "b": 2000.0}, "share": 0.25, "detail": {"x": 1}}, runs=1)
    assert report.show(result, "title", as_json=False) == 0
    shown = capsys.readouterr().out
    for text in ("a", "b", "value", "1.5", "2,000", "0.25", "–"):
        assert text in shown
    assert "detail" not in shown


def test_the_interval_of_a_median_lies_around_it() -> None:
    assert report.median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    middle, low, high = report.median_interval([float(i) for i in range(41)])
    assert middle == 20.0
    assert (low, high) == (13.0, 27.0)  # ranks 14 and 28 of 41, as in tables


# -- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", sorted(SIZES.values()))
def test_bodies_share_three_quarters_in_groups_and_never_the_rest(size: int) -> None:
    bodies = Bodies("m", size, stream=False, seed=1)
    texts = [json.loads(bodies.next())["messages"][0]["content"] for _ in range(512)]
    assert {len(text) for text in texts} == {size}
    quarter = size * 3 // 4
    assert set(Counter(text[:quarter] for text in texts).values()) == {512 // GROUPS}
    # Different before the last quarter is half over, whoever compares them.
    assert len({text[quarter : quarter + 12] for text in texts}) == 512


def test_seeds_share_groups_and_nothing_fresh() -> None:
    first, second = (Bodies("m", 4000, stream=True, seed=seed) for seed in (1, 2))
    one, two = ([json.loads(bodies.next()) for _ in range(32)] for bodies in (first, second))
    assert all(body["stream"] for body in one)
    contents = [[body["messages"][0]["content"] for body in bodies] for bodies in (one, two)]
    assert {text[:3000] for text in contents[0]} == {text[:3000] for text in contents[1]}
    assert not {text[3000:] for text in contents[0]} & {text[3000:] for text in contents[1]}


# -- generator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fast", [False, True])
async def test_each_request_is_sent_and_counted_once(stream: bool, fast: bool) -> None:
    async with fleet(2, config=SimConfig(fast=fast, record=10_000), events=False) as engines:
        bodies = Bodies("sim", 100, stream, seed=0)
        generator = Generator(Plan(8, 50, 30.0), bodies.next)
        result = await generator.run([engine.url for engine in engines])
        assert (result.sent, result.done, result.failed) == (50, 50, 0)
        assert 0 < result.p50 <= result.p99 <= result.elapsed
        if not fast:
            seen = [request.body for engine in engines for request in engine.app.requests]
            assert len(set(seen)) == len(seen) == 50
            assert all(engine.app.requests for engine in engines)


async def test_failures_are_counted_and_named() -> None:
    async with fleet(1, events=False) as (engine,):
        engine.set_faults(fail_next=3, fail_status=503)
        result = await Generator(Plan(1, 5, 30.0), Bodies("sim", 100, False, 0).next).run([engine.url])
        assert (result.sent, result.done, result.failed) == (5, 2, 3)
        assert result.first_failure == "status 503"
        engine.set_faults(die_at_once=True)
        result = await Generator(Plan(2, 5, 30.0), Bodies("sim", 100, False, 0).next).run([engine.url])
        assert (result.sent, result.done, result.failed) == (2, 0, 2)


async def test_a_run_ends_with_its_time() -> None:
    async with fleet(1, events=False) as (engine,):
        result = await Generator(Plan(4, 10**9, 0.2), Bodies("sim", 100, False, 0).next).run([engine.url])
        assert 0 < result.done == result.sent < 10**9


# -- the benchmark ------------------------------------------------------------------------------


def test_figures_are_medians_per_case_and_arm() -> None:
    def window(cpu: float) -> Window:
        return Window(cpu, Result(sent=10, done=10, elapsed=2.0, p50=0.001, p99=0.002, matched=50))

    shown = figures(
        {("small", "prefix"): [window(3.0), window(1.0), window(2.0)], ("small", ALONE): [window(0.5)]}
    )
    assert shown["gateway.cpu_us_small"] == {"prefix": 2.0, ALONE: 0.5}
    detail = shown["detail"]["small"]["prefix"]
    assert detail["cpu_us_runs"] == [3.0, 1.0, 2.0]
    assert (detail["requests"], detail["requests_per_s"], detail["matched_tokens"]) == (30, 5.0, 5.0)


def test_cpu_is_counted_over_the_tree() -> None:
    """A parent that only waits, whose child burns about 0.3 s of CPU."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    wait = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    parent = subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        alive = cpu_seconds([parent.pid])
        assert 0.25 <= alive <= 1.5
    finally:
        parent.communicate(b"\n")
    assert cpu_seconds([os.getpid()]) >= alive


def test_a_short_run_measures_every_arm() -> None:
    options: argparse.Namespace = parse(
        [
            "--runs",
            "1",
            "--requests",
            "40",
            "--warmup",
            "8",
            "--policies",
            "prefix",
            "--cases",
            "small",
            "small_stream",
        ]
    )
    result = bench_gateway.run(options)
    assert result["claims"] == []
    for case in ("small", "small_stream"):
        assert result["figures"][f"gateway.cpu_us_{case}"].keys() == {"prefix", ALONE}
        assert result["figures"]["detail"][case]["prefix"]["requests"] == 40
    assert msgspec.json.decode(msgspec.json.encode(result)) == result


async def test_engines_of_the_benchmark_answer_like_any() -> None:
    fast = SimConfig(fast=True)
    async with (
        fleet(1, config=fast, events=False) as (engine,),
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "sim"
        assert (await client.post("/v1/nothing", json={})).status_code == 404
