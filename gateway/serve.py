"""Puts a gateway together from its configuration and runs it until it is told to stop."""

import asyncio
import functools
import gc
import json
import logging
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
import uvloop

from cacheindex.hub import Hub, NodeSpec, SourceSpec
from cacheindex.table import Table
from gateway import config, exchange
from gateway.admin import build_admin, observe
from gateway.app import Parts, build_app
from gateway.health import Health
from gateway.http import App, Protocol
from gateway.metrics import Metrics
from gateway.retry import RetryBudget
from gateway.route import Router
from gateway.tenants import load_secret, load_tenants
from gateway.tokens import Tokenizers
from gateway.upstream import Upstream
from gateway.workers import Worker, Workers
from policies.routing import build

log = logging.getLogger("hotprefix.gateway")


class Gateway:
    """All parts of one gateway. ``start`` and ``stop`` belong to one event loop."""

    def __init__(self, settings: config.Gateway) -> None:
        self.settings = settings
        secret = load_secret(settings.secret_file)
        self.tenants = load_tenants(settings.keys_file, secret)
        clock = time.monotonic
        self.metrics = Metrics(worker.name for worker in settings.workers)
        self.index = Table(settings.index.bytes)
        self.hub = Hub(self.index, secret=secret)
        self.router = Router(
            build(settings.policy, random.Random(settings.seed)),
            self.index,
            self.hub,
            learned_bytes=settings.index.learned_bytes,
            predicted_s=settings.index.predicted_s,
            waiting_s=settings.upstream.first_byte_s,
            secret=secret,
            clock=clock,
        )
        self.workers = Workers(settings.workers, settings.health, self._up, self._down)
        self.tokenizers = Tokenizers(settings.tokens)
        self.budget = RetryBudget(settings.upstream.retry_share, settings.upstream.retry_floor, clock)
        self.metrics.observe(functools.partial(observe, self.workers, self.hub, self.index))
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._roots: dict[str, str | None] = {}

    async def start(self) -> tuple[App, App]:
        """Begin checking workers and reading events; returns both listeners' applications."""
        self.upstream = Upstream(self.settings.upstream)
        self.health = Health(self.workers, self.settings.health, log.info)
        shared = exchange.Shared(
            self.workers, self.router, self.upstream, self.budget, self.metrics, self._clock
        )
        exchanges = exchange.Exchanges(
            shared, attempts=self.settings.upstream.attempts, policy=str(self.settings.policy["name"])
        )
        self.hub.start()
        for node in self.settings.nodes:
            self.hub.watch_node(NodeSpec(node.name, node.events.endpoint, node.events.replay))
        self.health.start()
        parts = Parts(
            self.settings, self.tenants, self.workers, self.tokenizers, exchanges, self.metrics, self._clock
        )
        return build_app(parts), build_admin(parts, self.hub, self.index)

    async def stop(self) -> None:
        await self.health.close()
        for task in self._tasks:
            task.cancel()
        await self.upstream.close()
        self.hub.close()
        self.tokenizers.close()

    def _up(self, worker: Worker) -> None:
        served = worker.served
        assert served is not None
        log.info("worker %s is up and serves %s", worker.name, served.base)
        self.router.forget(worker.name)
        loading = asyncio.get_running_loop().create_task(self._load_tokenizer(served.base, served.root))
        self._tasks.add(loading)
        loading.add_done_callback(self._tasks.discard)
        events = worker.spec.events
        if events is not None:
            self.hub.watch(
                SourceSpec(
                    worker=worker.name,
                    model=served.base,
                    endpoint=events.endpoint,
                    replay_endpoint=events.replay,
                    bind=events.bind,
                    topic_prefix=events.topic,
                )
            )

    async def _load_tokenizer(self, model: str, root: str | None) -> None:
        if self._roots.get(model, "") == root and self.tokenizers.known(model):
            return  # a worker that went and came back
        self._roots[model] = root
        await self.tokenizers.load(model, root)
        if not self.tokenizers.known(model):
            why = self.tokenizers.why_not(model)
            log.warning(
                "prompts for %s are routed by their text (%s); name its tokenizer in tokens.tokenizers",
                model,
                why,
            )

    def _down(self, worker: Worker, reason: str) -> None:
        log.warning("worker %s is down: %s", worker.name, reason)
        self.router.forget(worker.name)
        self.hub.new_epoch(worker.name, reason)


class _Server(uvicorn.Server):
    """A server whose process handles signals itself, since it runs two of them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: config.Gateway) -> None:
    """Serve until SIGINT or SIGTERM. Prints one JSON line with both addresses once it listens.

    Raises OSError when an address is taken, ValueError for a configuration that cannot work.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(message)s"
    )
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if not settings.workers:
        log.warning("no workers are configured: every request will be answered 503")
    gc.freeze()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files for each request in flight
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(Gateway(settings)))


async def _until_signal(gateway: Gateway) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def ready(url: str, admin: str) -> None:
        print(json.dumps({"url": url, "admin": admin}), flush=True)
        log.info("serving on %s, for operators on %s", url, admin)

    await serve(gateway, ready, stop)


async def serve(gateway: Gateway, ready: Callable[[str, str], None], stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set, then let requests in flight end. ``ready`` hears the addresses of
    the inference and the admin listener."""
    settings = gateway.settings
    with _listen(settings.listen) as front, _listen(settings.admin) as back:
        app, admin = await gateway.start()
        servers = [_server(app, settings), _server(admin, settings)]
        serving = asyncio.gather(servers[0].serve(sockets=[front]), servers[1].serve(sockets=[back]))
        try:
            ready(_url(front), _url(back))
            serving.add_done_callback(lambda _: stop.set())
            await stop.wait()
            for server in servers:
                server.should_exit = True
            await serving
        finally:
            await gateway.stop()


def _listen(where: config.Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    return socket.create_server((where.host, where.port), family=family, backlog=2048)


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _server(app: App, settings: config.Gateway) -> _Server:
    protocol = functools.partial(Protocol, limits=settings.limits)
    return _Server(
        uvicorn.Config(
            cast(Any, app),
            http=cast(Any, protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=cast(Any, settings.grace_s),  # typed int, used as seconds of any kind
        )
    )
