"""Workers as the gateway sees them: up, down, restarted, and what they owe."""

import errno

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import config
from gateway.health import was_refused
from gateway.workers import Lease, Served, Worker, Workers, parse_models


def test_only_a_refusal_is_a_refusal() -> None:
    def failed(cause: OSError) -> httpx.ConnectError:
        error = httpx.ConnectError("no")
        error.__cause__ = cause
        return error

    assert was_refused(failed(ConnectionRefusedError()))
    assert not was_refused(failed(OSError(errno.EMFILE, "Too many open files")))


def fleet(count: int = 2) -> tuple[Workers, list[str], list[str]]:
    ups: list[str] = []
    downs: list[str] = []
    specs = [config.Worker(name=f"w{i}", url=f"http://x{i}") for i in range(count)]
    workers = Workers(
        specs,
        config.Health(failures=3),
        on_up=lambda worker: ups.append(worker.name),
        on_down=lambda worker, _: downs.append(worker.name),
    )
    return workers, ups, downs


SERVED = Served(base="m", names={"m": "", "ad": "ad"}, entries=[{"id": "m"}, {"id": "ad"}], started=1.0)


def test_a_worker_goes_down_after_failures_or_one_refusal_and_comes_back() -> None:
    workers, ups, downs = fleet()
    worker = workers.get("w0")
    assert workers.serving("m") == []
    workers.passed(worker, SERVED)
    assert (ups, workers.serving("ad"), workers.serving("zz")) == (["w0"], [worker], [])
    for _ in range(2):
        workers.failed(worker, "slow", refused=False)
    workers.passed(worker, SERVED)
    assert downs == []
    for _ in range(3):
        workers.failed(worker, "slow", refused=False)
    assert downs == ["w0"]
    workers.passed(worker, SERVED)
    workers.failed(worker, "refused", refused=True)
    assert downs == ["w0", "w0"]
    assert ups == ["w0", "w0"]


def test_an_unknown_start_time_means_nothing() -> None:
    workers, ups, downs = fleet()
    worker = workers.get("w0")
    workers.passed(worker, SERVED)
    workers.passed(worker, msgspec.structs.replace(SERVED, started=0.0))
    workers.passed(worker, SERVED)
    assert (ups, downs) == (["w0"], [])


def test_a_slow_check_does_not_end_streams_that_flow() -> None:
    workers, _, downs = fleet()
    worker = workers.get("w0")
    workers.passed(worker, SERVED)
    ended: list[str] = []
    waiting = workers.lease("w0", 10, lambda: ended.append("waiting"))
    flowing = workers.lease("w0", 10, lambda: ended.append("flowing"))
    flowing.first_byte()
    workers.failed(worker, "refused", refused=True)
    assert (downs, ended) == (["w0"], ["waiting"])
    waiting.release()
    workers.passed(worker, SERVED)
    workers.passed(worker, msgspec.structs.replace(SERVED, started=2.0))
    assert ended == ["waiting", "flowing"], "the engine is another one now"


def test_another_start_time_is_another_life() -> None:
    workers, ups, downs = fleet()
    worker = workers.get("w0")
    workers.passed(worker, SERVED)
    calls: list[int] = []
    workers.lease("w0", 10, lambda: calls.append(1))
    workers.passed(worker, msgspec.structs.replace(SERVED, started=2.0))
    assert (ups, downs, calls, worker.up) == (["w0", "w0"], ["w0"], [1], True)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["open", "first", "release"]), st.integers(0, 5), st.integers(0, 999)))
)
def test_leases_are_released_exactly_once(steps: list[tuple[str, int, int]]) -> None:
    workers, _, _ = fleet(1)
    worker: Worker = workers.get("w0")
    leases: list[Lease] = []
    for step, index, tokens in steps:
        if step == "open":
            leases.append(workers.lease("w0", tokens, lambda: None))
        elif leases:
            lease = leases[index % len(leases)]
            if step == "first":
                lease.first_byte()
            else:
                lease.release()
        worker.check_integrity()
    for lease in leases * 2:
        lease.release()
    assert (worker.running, worker.queued_tokens) == (0, 0)


def test_models_of_an_engine_are_read_with_adapters_and_aliases() -> None:
    served = parse_models(
        {
            "data": [
                {"id": "m", "root": "/x", "max_model_len": 9},
                {"id": "alias"},
                {"id": "ad", "parent": "m"},
            ]
        },
        3.0,
    )
    assert served.names == {"m": "", "alias": "", "ad": "ad"}
    assert (served.base, served.root, served.max_model_len) == ("m", "/x", 9)
    for bad in ({}, {"data": []}, {"data": [{}]}, [], {"data": [{"id": 3}]}):
        with pytest.raises(ValueError, match="no model"):
            parse_models(bad, 0.0)
