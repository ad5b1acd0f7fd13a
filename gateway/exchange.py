"""One request from plan to last byte: attempts, relay, and what is told to whom afterwards.

Before the first byte reaches the client a failed attempt may be planned again at another worker;
afterwards nothing is ever repeated or spliced.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from gateway.interrupt import Interrupt, Interrupted
from gateway.metrics import Metrics
from gateway.openai import ApiError
from gateway.retry import RetryBudget
from gateway.route import Plan, Query, Router
from gateway.stream import BrokenStream, Relay, Usage, clean_answer, error_event, read_usage
from gateway.upstream import Answer, Upstream, UpstreamFailed
from gateway.workers import Lease, Worker, Workers

log = logging.getLogger("hotprefix.gateway")

RETRIED = frozenset({500, 502, 503, 504})
"""Answers that say the engine, not the request, is at fault."""

CLIENT_GONE, WORKER_DOWN = "client gone", "worker down"


class Reply(Protocol):
    """The client's side. ``start`` is called once, before any ``write``; the last has ``more`` false."""

    async def start(self, status: int, headers: Mapping[str, str], *, length: int | None) -> None: ...
    async def write(self, data: bytes, *, more: bool) -> None: ...


class Call(msgspec.Struct, frozen=True):
    """A request ready to be sent. ``strip_usage``: the usage chunk is ours, not the client's.
    ``private``: the client may not see what was cached. ``arrived``: when its head was read."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    query: Query
    strip_usage: bool
    private: bool
    show_hits: bool
    request_id: str
    arrived: float


class Shared(msgspec.Struct, frozen=True):
    """What all exchanges share."""

    workers: Workers
    router: Router
    upstream: Upstream
    budget: RetryBudget
    metrics: Metrics
    clock: Callable[[], float]


class Exchanges:
    """Runs calls: plans, attempts, and plans again while nothing has reached the client."""

    def __init__(self, shared: Shared, *, attempts: int, policy: str) -> None:
        self._shared, self._attempts, self._policy = shared, attempts, policy

    async def run(self, call: Call, reply: Reply) -> str:
        """Serve one call; returns its outcome for the metrics. Raises ApiError when nothing has been
        sent to the client."""
        shared = self._shared
        shared.budget.request()
        excluded: set[str] = set()
        for number in range(1, self._attempts + 1):
            plan, worker = self._plan(call.query, excluded)
            attempt = _Attempt(shared, call, plan, _Sending(reply, self._head(call, plan)))
            try:
                return await attempt.run(worker)
            except UpstreamFailed as failure:
                shared.metrics.attempt_failed(worker.name, failure.reason)
                if failure.refused:
                    shared.workers.failed(worker, str(failure), refused=True)
                excluded.add(worker.name)
                self._may_retry(call, worker, failure, excluded, last=number == self._attempts)
        raise AssertionError("the last attempt returns or raises")

    def _plan(self, query: Query, excluded: set[str]) -> tuple[Plan, Worker]:
        workers = self._left(query, excluded)
        if not workers:
            raise ApiError(
                503,
                "No worker is ready to serve this model.",
                kind="server_error",
                code="no_worker",
                retry_after=1,
            )
        plan = self._shared.router.plan(query, workers)
        log.debug("chose %s: %s", plan.worker, plan.choice.why)
        self._shared.metrics.routed(plan.worker, self._policy)
        return plan, self._shared.workers.get(plan.worker)

    def _left(self, query: Query, excluded: set[str]) -> list[Worker]:
        return [w for w in self._shared.workers.serving(query.model) if w.name not in excluded]

    def _may_retry(
        self, call: Call, worker: Worker, failure: UpstreamFailed, excluded: set[str], *, last: bool
    ) -> None:
        """Returns when another worker may be tried; raises ApiError when this was the end."""
        log.warning("request %s: worker %s failed: %s", call.request_id, worker.name, failure)
        if failure.again and not last and self._left(call.query, excluded) and self._shared.budget.take():
            self._shared.metrics.retried(failure.reason)
            return
        raise _failed(failure) from failure

    def _head(self, call: Call, plan: Plan) -> dict[str, str]:
        head = {"x-request-id": call.request_id}
        if call.show_hits:
            head["x-hotprefix-worker"] = plan.worker
            head["x-hotprefix-policy"] = self._policy
            head["x-hotprefix-matched-tokens"] = str(plan.matched)
        return head


class _Sending:
    """What has gone to the client so far."""

    def __init__(self, reply: Reply, head: Mapping[str, str]) -> None:
        self._reply, self._head = reply, head
        self.started = False

    async def whole(self, answer: Answer, body: bytes) -> None:
        await self._reply.start(answer.status, {**answer.headers, **self._head}, length=len(body))
        self.started = True
        await self._reply.write(body, more=False)

    async def part(self, answer: Answer, data: bytes, *, more: bool) -> None:
        if not data and more:
            return
        if not self.started:
            await self._reply.start(answer.status, {**answer.headers, **self._head}, length=None)
            self.started = True
        await self._reply.write(data, more=more)

    async def break_off(self, failure: UpstreamFailed) -> None:
        await self._reply.write(error_event(_failed(failure).body()), more=False)


class _Attempt:
    """One plan carried out at one worker, under one lease."""

    def __init__(self, shared: Shared, call: Call, plan: Plan, sending: _Sending) -> None:
        self._shared, self._call, self._plan = shared, call, plan
        self._sending = sending
        self._computed = False

    async def run(self, worker: Worker) -> str:
        """The outcome. Raises UpstreamFailed only while nothing has been sent to the client."""
        lost = Interrupt()
        tokens = max(0, self._call.query.tokens - self._plan.matched)
        lease = self._shared.workers.lease(worker.name, tokens, functools.partial(lost.fire, WORKER_DOWN))
        try:
            with lost:
                answer = await self._shared.upstream.open(
                    worker, self._call.path, self._call.headers, self._call.body
                )
                async with answer:
                    return await self._serve(answer, lease)
        except (UpstreamFailed, Interrupted, BrokenStream) as error:
            failure = _as_failure(error)
            if not self._sending.started:
                raise failure from error
            self._shared.metrics.attempt_failed(worker.name, failure.reason)
            log.warning("request %s: worker %s broke off: %s", self._call.request_id, worker.name, failure)
            await self._sending.break_off(failure)
            return "broken_stream"
        finally:
            lease.release()
            if not self._computed:
                self._shared.router.failed(self._plan)

    async def _serve(self, answer: Answer, lease: Lease) -> str:
        if answer.status in RETRIED:
            raise UpstreamFailed(f"status_{answer.status}", f"it answered {answer.status}")
        if answer.status >= 300:
            await self._sending.whole(answer, await answer.read())
            return "client_error" if answer.status < 500 else "failed"
        if answer.streaming:
            usage = await self._stream(answer, lease)
        else:
            body = await answer.read()
            self._first_byte(lease)
            usage = read_usage(body)
            await self._sending.whole(answer, clean_answer(body, private=self._call.private))
        cause = self._shared.router.finished(self._plan, usage.cached_tokens if usage else None)
        self._shared.metrics.finished(self._plan.worker, usage, self._plan.matched, cause)
        return "ok"

    async def _stream(self, answer: Answer, lease: Lease) -> Usage | None:
        relay = Relay(strip_usage=self._call.strip_usage, private=self._call.private)
        async for chunk in answer.chunks():
            if not self._computed:
                self._first_byte(lease)
            await self._sending.part(answer, relay.feed(chunk), more=True)
        await self._sending.part(answer, relay.end(), more=False)
        return relay.usage

    def _first_byte(self, lease: Lease) -> None:
        self._computed = True
        lease.first_byte()
        self._shared.router.first_byte(self._plan)
        self._shared.metrics.first_byte(self._plan.worker, self._shared.clock() - self._call.arrived)


def _failed(failure: UpstreamFailed) -> ApiError:
    """What the client is told: no address and none of the engine's words."""
    return ApiError(
        502,
        f"The engine behind this request failed ({failure.reason}).",
        kind="server_error",
        code="upstream_failed",
        retry_after=1,
    )


def _as_failure(error: Exception) -> UpstreamFailed:
    if isinstance(error, UpstreamFailed):
        return error
    reason = "worker_down" if isinstance(error, Interrupted) else "broken"
    return UpstreamFailed(reason, str(error))
