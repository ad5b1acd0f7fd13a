"""Starts engines on this machine: real ones (vLLM on CPU) and simulated ones, singly or as a fleet.

The launcher, the engine tests and the benchmarks share this code. Knows how engines are started, not
what is asked of them.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec

from hotprefix.errors import CommandError
from hotprefix.home import Home, checkout
from hotprefix.processes import Child, Port, RunFolder, wait_until
from hotprefix.progress import Board, Say

Kind = Literal["vllm", "sim"]

KV_BYTES_PER_TOKEN = 23_040
"""Of SmolLM2-135M in bfloat16: 30 layers, keys and values, 3 heads of 64; what a simulated engine takes."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Engines are on this machine, whatever proxy the environment names."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to start. ``cores`` are bound for vLLM's threads, as many as it shall have.
    ``blocks`` caps the KV cache at that many blocks, for tests that need evictions."""

    name: str
    kind: Kind = "vllm"
    model: str = ""
    """A model folder or hub name; "" is allowed for simulated engines."""
    served_name: str = "smollm2"
    cores: tuple[int, ...] = ()
    block_size: int = 32
    kv_gib: int = 1
    blocks: int | None = None
    max_model_len: int = 4096
    max_num_seqs: int = 8
    events: bool = True
    dev_mode: bool = False
    """Serves ``/reset_prefix_cache``."""
    node: str | None = None
    """Path of a cache node's socket: the engine keeps its KV there. The node need not run yet."""
    secret_file: str | None = None
    """The gateway's, absolute: without it the node keeps nothing of requests with a ``cache_salt``."""
    python: str = ""
    """The Python that holds vLLM; "" is the home's engine environment."""
    extra: tuple[str, ...] = ()
    """More arguments for the engine's command line."""


class Part(Protocol):
    """Something started that becomes healthy or dies."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def ready_url(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def exit_code(self) -> int | None: ...

    def tail(self, lines: int = 20) -> str: ...


def answers(url: str) -> bool:
    """Whether ``url`` answers 200 now."""
    try:
        with _DIRECT.open(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


class Engine:
    """A started engine. Its URL and event endpoints stay the same over ``restart``."""

    def __init__(self, spec: EngineSpec, home: Home, folder: RunFolder, log: Path) -> None:
        self.spec = spec
        self.name = spec.name
        self._folder = folder
        self._log = log
        self._home = home
        self._port = Port()
        self.url = f"http://127.0.0.1:{self._port.number}"
        self.events = folder.endpoint(f"{spec.name}.ev") if spec.events else None
        self.replay = folder.endpoint(f"{spec.name}.re") if spec.events else None
        self.topic = f"kv@{spec.name}@{spec.served_name}" if spec.events else ""
        self._child = self._start(keep_log=False)

    def _start(self, keep_log: bool) -> Child:
        command = (vllm_command if self.spec.kind == "vllm" else sim_command)(
            self.spec, self._home, self._port.number, self.event_config()
        )
        env, cwd = dict(os.environ), None
        if self.spec.kind == "vllm":
            # Python looks for modules in the folder where it is started before anywhere else.
            cwd = self._folder.path
            env |= vllm_environment(self.spec)
            if self.spec.node is not None:
                env["PYTHONPATH"] = str(connector_path(self._folder))
        return Child(command, log=self._log, folder=self._folder, env=env, keep_log=keep_log, cwd=cwd)

    def event_config(self) -> dict[str, str] | None:
        """Endpoint, replay endpoint and topic, as vLLM names them; None without events."""
        if self.events is None or self.replay is None:
            return None
        return {"endpoint": self.events, "replay_endpoint": self.replay, "topic": self.topic}

    @property
    def ready_url(self) -> str:
        """Answers 200 once the engine serves."""
        return f"{self.url}/health"

    @property
    def pid(self) -> int | None:
        """The engine's main process."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.exit_code

    @property
    def process(self) -> Child:
        """The process of the current life, for signals."""
        return self._child

    def healthy(self) -> bool:
        """Whether it answers now."""
        return self.exit_code is None and answers(self.ready_url)

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return self._child.tail(lines)

    def kill(self) -> None:
        """SIGKILL; gone on return, its port still reserved for ``restart``."""
        self._child.kill()

    def restart(self) -> None:
        """Ends it if it runs and starts it anew on the same URL and endpoints; does not wait."""
        self._child.kill()
        self._child = self._start(keep_log=True)

    def wait_healthy(self, timeout_s: float = 600.0) -> None:
        """Raises CommandError with the tail of its log when it dies or takes too long."""
        wait_all([self], timeout_s)

    def ask_to_stop(self) -> None:
        """Starts stopping; ``stop`` waits for it."""
        self._child.ask_to_stop()

    def stop(self) -> None:
        """Ends it and gives its port back."""
        self._child.stop()
        self._port.close()


def vllm_environment(spec: EngineSpec) -> dict[str, str]:
    """What vLLM on CPU takes from its environment. It binds every engine to core 0 unless told."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_gib),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.cores:
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in spec.cores)
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if spec.dev_mode:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    return env


def connector_path(folder: RunFolder) -> Path:
    """A folder for an engine's ``PYTHONPATH`` that shows it the connector and nothing else of ours: neither
    the rest of a checkout nor, where hotprefix is installed, packages meant for another environment."""
    path = folder.path / "python"
    path.mkdir(exist_ok=True)
    for package in ("cachenode", "cacheindex", "policies"):
        if not (path / package).exists():
            (path / package).symlink_to(checkout() / package, target_is_directory=True)
    return path


def connector_flags(socket: str, worker: str, secret_file: str | None = None) -> list[str]:
    """What makes vLLM keep its KV in the node behind ``socket``; ``worker`` is the engine's name there."""
    extra = {"hotprefix.socket": socket, "hotprefix.worker": worker}
    if secret_file is not None:
        extra["hotprefix.secret_file"] = secret_file
    config = {
        "kv_connector": "HotprefixConnector",
        "kv_connector_module_path": "cachenode.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(config)]


def native_bfloat16(cpuinfo: str) -> bool:
    """Whether a CPU, by its ``/proc/cpuinfo``, multiplies bfloat16 itself. Without, vLLM's bfloat16 is
    four times slower than its float32 (measured on an AVX2-only EPYC: 33 against 140 prompt tokens/s)."""
    flags = set(cpuinfo.split())
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def dtype_here() -> str:
    """The faster type of weights and KV on this machine."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "auto"
    return "auto" if native_bfloat16(cpuinfo) else "float32"


def vllm_command(spec: EngineSpec, home: Home, port: int, events: Mapping[str, str] | None) -> list[str]:
    """Started as a module, because the console script of the CPU build fails."""
    python = spec.python or str(home.engine / "bin" / "python")
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", spec.model, "--served-model-name", spec.served_name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    command += ["--enable-prefix-caching", "--block-size", str(spec.block_size)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", "--dtype", dtype_here()]
    if spec.blocks is not None:
        command += ["--num-gpu-blocks-override", str(spec.blocks)]
    if events is not None:
        config = {"enable_kv_cache_events": True, "publisher": "zmq", **events}
        command += ["--kv-events-config", json.dumps(config)]
    if spec.node is not None:
        command += connector_flags(spec.node, spec.name, spec.secret_file)
    return [*command, *spec.extra]


def sim_command(spec: EngineSpec, _home: Home, port: int, events: Mapping[str, str] | None) -> list[str]:
    """The simulated engine with the same shape as the real one: block size, KV size, queue."""
    command = [sys.executable, "-m", "hotprefix.cli", "sim", "--port", str(port)]
    command += ["--model", spec.served_name, "--block-size", str(spec.block_size)]
    command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    if spec.model:
        command += ["--model-path", spec.model]
    blocks = spec.blocks or (spec.kv_gib << 30) // (KV_BYTES_PER_TOKEN * spec.block_size)
    command += ["--num-blocks", str(blocks)]
    if events is not None:
        command += ["--events-endpoint", events["endpoint"], "--replay-endpoint", events["replay_endpoint"]]
        command += ["--topic", events["topic"]]
    return [*command, *spec.extra]


def core_shares(engines: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Cores for each of so many engines: equal runs of neighbours, or one each in turn when there are
    fewer cores than engines."""
    each = len(cores) // engines
    if each == 0:
        return [(cores[i % len(cores)],) for i in range(engines)]
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(engines)]


def allowed_cores() -> list[int]:
    """The cores this process may use; numbers from 0 where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def wait_all(parts: Sequence[Part], timeout_s: float, board: Board | None = None) -> None:
    """Returns when every part is healthy. Raises CommandError with a log's tail when one dies, or when
    ``timeout_s`` is over."""
    waiting = list(parts)

    def look() -> bool:
        for part in list(waiting):
            if part.exit_code is not None:
                raise CommandError(f"{part.name} ended with status {part.exit_code}; its log:\n{part.tail()}")
            if answers(part.ready_url):
                waiting.remove(part)
                if board is not None:
                    board.done(part.name, f"{part.url} (process {part.pid})")
        if board is not None:
            board.tick()
        return not waiting

    if not wait_until(look, timeout_s):
        late = waiting[0]
        raise CommandError(f"{late.name} is not healthy after {timeout_s:.0f} s; its log:\n{late.tail()}")


class Fleet:
    """Engines that live and end together, with one run folder. Logs go to ``logs``, one file an engine."""

    def __init__(self, home: Home, logs: Path | None = None) -> None:
        self._home = home
        self.logs = logs or home.logs
        self.folder = RunFolder()
        self.engines: list[Engine] = []

    def start_engine(self, spec: EngineSpec) -> Engine:
        """Starts one and returns at once; ``wait_healthy`` waits."""
        engine = Engine(spec, self._home, self.folder, self.logs / f"{spec.name}.log")
        self.engines.append(engine)
        return engine

    def wait_healthy(self, timeout_s: float = 600.0, say: Say | None = None) -> None:
        """Waits for all engines; ``say`` is told the progress."""
        wait_all(self.engines, timeout_s, None if say is None else Board(say, [e.name for e in self.engines]))

    def stop_engines(self) -> None:
        """Ends all at once and gives the ports back; again is a no-op."""
        for engine in self.engines:
            engine.ask_to_stop()
        for engine in self.engines:
            engine.stop()

    def stop(self) -> None:
        """Ends all engines and removes the run folder; again is a no-op."""
        self.stop_engines()
        self.folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
