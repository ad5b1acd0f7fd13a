"""A cache node as a process on this machine, beside the engines of a fleet. The launcher, the tests and the
benchmarks start it so; what a node does is the business of ``cachenode``."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hotprefix.engines import wait_all
from hotprefix.processes import Child, Port, RunFolder


class LocalNode:
    """A started node. Its socket, its event endpoints and its port stay the same over ``restart``. ``config``
    is what its configuration file says beyond what is given here; the environment counts as usual."""

    def __init__(
        self,
        folder: RunFolder,
        logs: Path,
        *,
        memory_bytes: int,
        name: str = "node",
        admin_port: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.socket = str(folder.path / f"{name}.sock")
        self.events = folder.endpoint(f"{name}.ev")
        self.replay = folder.endpoint(f"{name}.re")
        self._folder = folder
        self._log = logs / f"{name}.log"
        self._port = Port(admin_port)
        self.url = f"http://127.0.0.1:{self._port.number}"
        self._file = folder.path / f"{name}.yaml"
        self._file.write_bytes(msgspec.yaml.encode(dict(config or {})))
        self._flags = ["--name", name, "--socket", self.socket, "--memory-bytes", str(memory_bytes)]
        self._flags += ["--events-endpoint", self.events, "--events-replay", self.replay]
        self._flags += ["--admin-host", "127.0.0.1", "--admin-port", str(self._port.number)]
        self._child = self._start(keep_log=False)

    def _start(self, keep_log: bool) -> Child:
        command = [sys.executable, "-m", "hotprefix.cli", "node", "--config", str(self._file), *self._flags]
        return Child(command, log=self._log, folder=self._folder, env=os.environ, keep_log=keep_log)

    @property
    def entry(self) -> dict[str, Any]:
        """The node as an entry of ``nodes`` in a gateway's configuration."""
        return {"name": self.name, "events": {"endpoint": self.events, "replay": self.replay}}

    @property
    def ready_url(self) -> str:
        """Answers 200 once engines can use it."""
        return f"{self.url}/ready"

    @property
    def pid(self) -> int | None:
        """The node's process."""
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

    def kill(self) -> None:
        """SIGKILL, as a crash; its port stays reserved for ``restart``."""
        self._child.kill()

    def restart(self) -> None:
        """Ends it if it runs and starts it anew, empty, behind the same socket; does not wait."""
        self._child.kill()
        self._child = self._start(keep_log=True)

    def stop(self, grace_s: float = 10.0) -> None:
        """Gone on return, its port given back."""
        self._child.stop(grace_s)
        self._port.close()
