"""A whole gateway over simulated engines, on ports the kernel chooses, in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway import config
from gateway.serve import Gateway, serve
from loadtest.harness import eventually, fleet
from loadtest.sim.config import SimConfig
from loadtest.simengine import SimEngine
from loadtest.tinymodel import write_tiny_model

TEXT = "The river bends twice before the mill, and the old road follows it as far as the bridge. "


class Stack:
    """Engines, the gateway before them, and a client of both its listeners."""

    def __init__(self, engines: list[SimEngine], gateway: Gateway, url: str, admin_url: str) -> None:
        self.engines, self.gateway = engines, gateway
        self.url, self.admin_url = url, admin_url
        self.stop = asyncio.Event()
        self.client = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)

    def engine(self, name: str) -> SimEngine:
        return self.engines[int(name[1:])]

    def requests(self) -> list[Any]:
        """What the engines were asked, health checks and the like left out."""
        return [
            request
            for engine in self.engines
            for request in engine.app.requests
            if request.method == "POST" and request.path.startswith("/v1/")
        ]

    async def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name with these labels."""
        total = 0.0
        for family in self.gateway.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    async def settled(self) -> None:
        """Every event the engines published has been applied."""

        def done() -> bool:
            for index, engine in enumerate(self.engines):
                status = self.gateway.hub.status(f"w{index}")
                if status is None or not status.connected:
                    return False
                if engine.next_seq and (status.last_seq is None or status.last_seq < engine.next_seq - 1):
                    return False
            return True

        await eventually(done, what="events applied")


Start = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def start(tiny_model: Path) -> Start:
    """``async with start(count, engine={…}, policy=…, events=…, node=…, **settings) as stack``; ``node``
    is the name of the node beside every worker."""

    @asynccontextmanager
    async def run(
        count: int = 2,
        *,
        engine: dict[str, Any] | None = None,
        events: bool = True,
        policy: str = "prefix",
        ready: bool = True,
        node: str | None = None,
        **settings: Any,
    ) -> AsyncIterator[Stack]:
        sim = SimConfig(model_path=str(tiny_model), **(engine or {}))
        async with fleet(count, config=sim, events=events) as engines:
            options = {
                "health": {"interval_s": 0.05, "timeout_s": 2.0, "failures": 2},
                "policy": {"name": policy},
                **settings,
            }
            spec = msgspec.convert(options, config.Gateway)
            spec.listen, spec.admin = config.Listen(port=0), config.Listen(port=0)
            spec.workers = [_worker(index, one, node) for index, one in enumerate(engines)]
            gateway, stop, urls = Gateway(spec), asyncio.Event(), list[str]()
            serving = asyncio.create_task(serve(gateway, lambda *both: urls.extend(both), stop))
            await eventually(lambda: urls or serving.done())
            if serving.done():
                serving.result()
            stack = Stack(engines, gateway, *urls)
            stack.stop = stop
            try:
                if ready:
                    await eventually(lambda: len(gateway.workers.serving(None)) == count)
                    await eventually(lambda: gateway.tokenizers.known("sim"))
                    if events:
                        await stack.settled()
                yield stack
            finally:
                await stack.client.aclose()
                stop.set()
                await serving

    return run


def _worker(index: int, engine: SimEngine, node: str | None) -> config.Worker:
    events = None
    if engine.config.events_endpoint:
        events = config.Events(endpoint=engine.events_endpoint, replay=engine.replay_endpoint)
    return config.Worker(name=f"w{index}", url=engine.url, events=events, node=node)
