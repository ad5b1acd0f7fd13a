"""Control calls to engines: is it up, what does it serve, since when. One task a worker."""

import asyncio
from collections.abc import Callable

import httpx

from gateway import config
from gateway.workers import Served, Worker, Workers, parse_models

FACTS_EVERY = 10
"""Checks between two looks at what an engine serves and when it started."""

START_METRIC = "process_start_time_seconds"


class Health:
    """Checks every worker each interval until closed. ``errors`` counts checks that crashed."""

    def __init__(self, workers: Workers, settings: config.Health, log: Callable[[str], None]) -> None:
        self._workers, self._settings, self._log = workers, settings, log
        self._client = httpx.AsyncClient(timeout=settings.timeout_s, follow_redirects=False, trust_env=False)
        self._tasks: list[asyncio.Task[None]] = []
        self.errors = 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch(worker)) for worker in self._workers.all()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _watch(self, worker: Worker) -> None:
        turn = 0
        while True:
            try:
                await self.check(worker, facts=not worker.up or turn % FACTS_EVERY == 0)
            except Exception as error:  # a check must never end the checking
                self.errors += 1
                self._log(f"check of worker {worker.name} crashed: {error!r}")
            turn += 1
            await asyncio.sleep(self._settings.interval_s)

    async def check(self, worker: Worker, *, facts: bool) -> None:
        """One check; ``facts`` also asks what it serves and when it started."""
        try:
            answer = await self._get(worker, "/health")
            if answer.status_code != 200:
                raise httpx.HTTPError(f"/health answers {answer.status_code}")
            served = await self._facts(worker) if facts or worker.served is None else worker.served
        except httpx.ConnectError as error:
            self._workers.failed(worker, f"no connection: {error}", refused=was_refused(error))
        except (httpx.HTTPError, ValueError) as error:
            self._workers.failed(worker, str(error) or type(error).__name__, refused=False)
        else:
            self._workers.passed(worker, served)

    async def _facts(self, worker: Worker) -> Served:
        models = await self._get(worker, "/v1/models")
        metrics = await self._get(worker, "/metrics")
        started = _start_time(metrics.text) if metrics.status_code == 200 else 0.0
        if models.status_code != 200:
            raise httpx.HTTPError(f"/v1/models answers {models.status_code}")
        return parse_models(models.json(), started)

    async def _get(self, worker: Worker, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {worker.spec.api_key}"} if worker.spec.api_key else {}
        return await self._client.get(worker.spec.url.rstrip("/") + path, headers=headers)


def was_refused(error: BaseException | None) -> bool:
    """Whether nothing listens there: a full table of files or a slow name server looks alike at first."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _start_time(text: str) -> float:
    for line in text.splitlines():
        if line.startswith(START_METRIC):
            try:
                return float(line.rsplit(" ", 1)[1])
            except ValueError:
                return 0.0
    return 0.0
