"""A gateway as a process on this machine, before the engines of a fleet. The launcher, the tests and
the benchmarks start it so; what a gateway does is the business of ``gateway``."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hotprefix.engines import Engine, wait_all
from hotprefix.local_node import LocalNode
from hotprefix.processes import Child, Port, RunFolder

_NOT_INHERITED = ("HOTPREFIX_CONFIG", "HOTPREFIX_WORKERS", "HOTPREFIX_NODES")
"""Variables that would replace the workers and nodes that are given here."""


def worker_entry(engine: Engine, node: LocalNode | None = None) -> dict[str, Any]:
    """The engine as an entry of ``workers`` in a gateway's configuration; ``node`` is the one it uses."""
    entry: dict[str, Any] = {"name": engine.name, "url": engine.url}
    if engine.events is not None:
        entry["events"] = {"endpoint": engine.events, "replay": engine.replay, "topic": engine.topic}
    if node is not None:
        entry["node"] = node.name
    return entry


def gateway_environ() -> dict[str, str]:
    """The environment a gateway is started in."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}


class LocalGateway:
    """A started gateway. ``config`` is what its configuration file says beyond workers, nodes and listeners,
    ``flags`` are flags of ``hotprefix gateway``; the environment counts as usual. An engine's node is found
    among ``nodes`` by its socket."""

    name = "gateway"

    def __init__(
        self,
        engines: Sequence[Engine],
        folder: RunFolder,
        logs: Path,
        *,
        port: int = 0,
        admin_port: int = 0,
        config: Mapping[str, Any] | None = None,
        flags: Sequence[str] = (),
        nodes: Sequence[LocalNode] = (),
    ) -> None:
        self._ports = [Port(port)]
        try:
            self._ports.append(Port(admin_port))
        except BaseException:
            self._ports[0].close()
            raise
        self.url, self.admin_url = (f"http://127.0.0.1:{held.number}" for held in self._ports)
        file = folder.path / f"gateway-{self._ports[0].number}.yaml"
        by_socket = {node.socket: node for node in nodes}
        settings: dict[str, Any] = dict(config or {})
        settings["workers"] = [worker_entry(one, by_socket.get(one.spec.node or "")) for one in engines]
        if nodes:
            settings["nodes"] = [node.entry for node in nodes]
        file.write_bytes(msgspec.yaml.encode(settings))
        listen = ["--listen-host", "127.0.0.1", "--listen-port", str(self._ports[0].number)]
        listen += ["--admin-host", "127.0.0.1", "--admin-port", str(self._ports[1].number)]
        self._child = Child(
            [sys.executable, "-m", "hotprefix.cli", "gateway", "--config", str(file), *listen, *flags],
            log=logs / "gateway.log",
            folder=folder,
            env=gateway_environ(),
        )

    @property
    def ready_url(self) -> str:
        """Answers 200 once the gateway has a worker to send requests to."""
        return f"{self.url}/ready"

    @property
    def pid(self) -> int | None:
        """The gateway's process."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.exit_code

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return self._child.tail(lines)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Raises CommandError with the tail of its log when it dies or takes too long."""
        wait_all([self], timeout_s)

    def stop(self, grace_s: float = 10.0) -> None:
        """Lets requests in flight end within ``grace_s``; gone on return, ports given back."""
        self._child.stop(grace_s)
        for held in self._ports:
            held.close()
