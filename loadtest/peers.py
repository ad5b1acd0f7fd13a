"""Other projects' software that benchmarks compare with, each in an environment of its own.

``hotprefix peers lmcache`` sets up LMCache 0.5.6 with vLLM for CPU (about 3.5 GB) under ``peers/`` of the
home. Where it cannot be had, a benchmark says so in the claim's ``reason``.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from hotprefix.engine_env import Environment, ensure_environment, pins_file
from hotprefix.engines import wait_all
from hotprefix.home import Home, find_home
from hotprefix.processes import Child, Port, RunFolder
from hotprefix.progress import Say, say_error

LMCACHE = "lmcache"
LMCACHE_CHUNK = 64
"""Tokens of LMCache's chunk: the best of 32 to 256 for prompts of 500 to 5,000 tokens and block 32."""


def main(arguments: Sequence[str]) -> int:
    """Entry of ``hotprefix peers lmcache``."""
    parser = argparse.ArgumentParser(
        prog="hotprefix peers lmcache",
        description="Set up LMCache 0.5.6 with vLLM for CPU (about 3.5 GB), for the node's benchmarks.",
    )
    parser.parse_args(arguments)
    ensure_lmcache(find_home(), say_error)
    return 0


def lmcache_environment(home: Home) -> Environment:
    """Where LMCache lies. Raises NoEngine without a checkout."""
    pins = pins_file(f"peers/{LMCACHE}.txt")
    return Environment(LMCACHE, home.peer(LMCACHE), pins, "LMCache and vLLM for CPU (about 3.5 GB)")


def ensure_lmcache(home: Home, say: Say) -> Path:
    """The Python of an environment that holds vLLM and LMCache, set up first if it is not there. Raises
    CommandError."""
    return ensure_environment(home, lmcache_environment(home), say)


class LMCacheServer:
    """A started LMCache server over shared memory. Engines reach it with ``engine_flags``."""

    name = LMCACHE

    def __init__(self, python: Path, folder: RunFolder, log: Path, *, gib: float) -> None:
        self._ports = [Port(), Port()]
        self.port, http = (held.number for held in self._ports)
        self.url = f"http://127.0.0.1:{http}"
        self._shared = f"hp-lmcache-{self.port}"
        self._child = Child(
            lmcache_command(python, self.port, http, self._shared, gib),
            log=log,
            folder=folder,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
            cwd=folder.path,
        )

    @property
    def ready_url(self) -> str:
        """Answers 200 once it serves."""
        return f"{self.url}/healthcheck"

    @property
    def pid(self) -> int | None:
        """The server's process."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.exit_code

    @property
    def engine_flags(self) -> tuple[str, ...]:
        """What an engine is told to use this server."""
        return lmcache_flags(self.port)

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return self._child.tail(lines)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Raises CommandError with the tail of its log when it dies or takes too long."""
        wait_all([self], timeout_s)

    def stop(self) -> None:
        """Ends it, gives its ports back, removes the shared memory that it leaves behind."""
        self._child.stop()
        for held in self._ports:
            held.close()
        for path in Path("/dev/shm").glob(f"*{self._shared}*"):
            with contextlib.suppress(OSError):
                path.unlink()


def lmcache_command(python: Path, port: int, http: int, shared: str, gib: float) -> list[str]:
    """LMCache's server with shared memory as its transport, its fastest on a CPU."""
    command = [str(python.parent / "lmcache"), "server", "--port", str(port), "--http-port", str(http)]
    command += ["--l1-size-gb", f"{gib:g}", "--chunk-size", str(LMCACHE_CHUNK), "--max-workers", "2"]
    return [*command, "--supported-transfer-mode", "auto", "--shm-name", shared, "--eviction-policy", "LRU"]


def lmcache_flags(port: int) -> tuple[str, ...]:
    """vLLM's flags for LMCache's connector."""
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    return ("--kv-transfer-config", json.dumps(config))
