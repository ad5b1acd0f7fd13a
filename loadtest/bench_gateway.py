"""``hotprefix bench gateway``: CPU the gateway spends on a request.

One gateway process per policy before four simulated engines that answer at once; a load generator in
a process of its own keeps 32 connections busy. CPU is user + system time of the gateway's process
tree over the requests of a window. Windows of the arms (each policy, and the engines without a
gateway) follow one another inside each run, so that a busy machine disturbs all alike; figures are
medians over the runs. No claim has a limit yet: these are figures.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import psutil

from hotprefix.errors import CommandError
from hotprefix.processes import Child, Port, RunFolder, wait_until
from loadtest.bodies import SIZES
from loadtest.generator import Result
from loadtest.report import report, show
from loadtest.tinymodel import write_tiny_model

ENGINES = 4
CONNECTIONS = 32
POLICIES = ("round-robin", "prefix")
ALONE = "upstream alone"
MODEL = "sim"

_READY_S = 60.0
_ROOT = Path(__file__).resolve().parent.parent


class Case(NamedTuple):
    """One kind of request; ``name`` ends the figure's name."""

    name: str
    size: str
    stream: bool


CASES = tuple(
    Case(size + ("_stream" if stream else ""), size, stream) for stream in (False, True) for size in SIZES
)


class Window(NamedTuple):
    """One measured stretch of load on one arm."""

    cpu_us: float
    result: Result


class Arm(NamedTuple):
    """What is loaded, and the processes whose CPU counts."""

    name: str
    urls: list[str]
    pids: list[int]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; the result is in the form of ``loadtest.report``. Raises CommandError when
    a process does not start or a request fails."""
    cases = [case for case in CASES if case.name in options.cases]
    windows: dict[tuple[str, str], list[Window]] = {}
    with arms(options.policies) as ready:
        for number in range(options.runs):
            turn = number % len(ready)
            for case in cases:
                for arm in [*ready[turn:], *ready[:turn]]:
                    window = measure(arm, case, options, seed=number)
                    windows.setdefault((case.name, arm.name), []).append(window)
        return report([], figures(windows), options.runs)


def figures(windows: Mapping[tuple[str, str], Sequence[Window]]) -> dict[str, Any]:
    """``gateway.cpu_us_CASE`` -> {arm: median}, and under ``detail`` what else was seen."""
    medians: dict[str, Any] = {}
    detail: dict[str, Any] = {}
    for (case, arm), seen in windows.items():
        values = [window.cpu_us for window in seen]
        results = [window.result for window in seen]
        medians.setdefault(f"gateway.cpu_us_{case}", {})[arm] = round(statistics.median(values), 1)
        detail.setdefault(case, {})[arm] = {
            "cpu_us_runs": [round(value, 1) for value in values],
            "requests": sum(result.done for result in results),
            "requests_per_s": _median(result.done / result.elapsed for result in results),
            "p50_ms": _median(1000 * result.p50 for result in results),
            "p99_ms": _median(1000 * result.p99 for result in results),
            "matched_tokens": _median(result.matched / result.done for result in results),
        }
    return {**medians, "detail": detail}


def measure(arm: Arm, case: Case, options: argparse.Namespace, seed: int) -> Window:
    """Warm up, then load for a window and take the CPU of the arm's processes for it."""
    generate(arm, case, requests=options.warmup, seconds=options.seconds, seed=2 * seed + 1)
    before = cpu_seconds(arm.pids)
    result = generate(arm, case, requests=options.requests, seconds=options.seconds, seed=2 * seed)
    spent = cpu_seconds(arm.pids) - before
    if result.failed or not result.done:
        failed = f"{result.failed} of {result.sent} requests failed, {result.first_failure}"
        raise CommandError(f"{arm.name}, {case.name}: {failed}")
    return Window(1e6 * spent / result.done, result)


def generate(arm: Arm, case: Case, *, requests: int, seconds: float, seed: int) -> Result:
    """Load from a process of its own."""
    command = [sys.executable, "-m", "loadtest.generator", "--model", MODEL, "--size", case.size]
    command += ["--connections", str(CONNECTIONS), "--requests", str(requests), "--seconds", str(seconds)]
    command += ["--seed", str(seed), *(["--stream"] if case.stream else [])]
    for url in arm.urls:
        command += ["--url", url]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=seconds + 60
        )
    except subprocess.CalledProcessError as error:
        raise CommandError(f"the load generator failed:\n{error.stderr[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{arm.name}, {case.name}: no end after {error.timeout:.0f} s") from error
    return msgspec.json.decode(done.stdout, type=Result)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User + system seconds of these processes and of what they started, the finished included."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
    return total


# -- processes ----------------------------------------------------------------------------------


@contextmanager
def arms(policies: Sequence[str]) -> Iterator[list[Arm]]:
    """Engines and one gateway per policy, started and healthy; all gone afterwards."""
    with ExitStack() as stack:
        folder = RunFolder()
        stack.callback(folder.remove)
        model = write_tiny_model(folder.path / "model")
        engines = [start_engine(stack, folder, i, model) for i in range(ENGINES)]
        wait_up(engines)
        urls = [engine.url for engine in engines]
        gateways = [start_gateway(stack, folder, policy, urls) for policy in policies]
        wait_up(gateways)
        alone = Arm(ALONE, urls, [pid for engine in engines for pid in engine.pids])
        yield [*(Arm(gateway.name, [gateway.url], gateway.pids) for gateway in gateways), alone]


class Part(NamedTuple):
    """A started process; ``health`` answers 200 once it can be used."""

    name: str
    url: str
    health: str
    child: Child

    @property
    def pids(self) -> list[int]:
        return [] if self.child.pid is None else [self.child.pid]


def start_engine(stack: ExitStack, folder: RunFolder, number: int, model: Path) -> Part:
    """A simulated engine that answers at once."""
    port = _port(stack)
    command = ["-m", "loadtest.simengine", "--fast", "--port", str(port), "--model", MODEL]
    command += ["--model-path", str(model), "--max-model-len", "131072"]
    return Part(f"engine-{number}", _url(port), "/health", _child(stack, folder, f"engine-{number}", command))


def start_gateway(stack: ExitStack, folder: RunFolder, policy: str, urls: Sequence[str]) -> Part:
    """A gateway with one policy and everything else as it is by default."""
    port, admin = _port(stack), _port(stack)
    config = {
        "listen": {"port": port},
        "admin": {"port": admin},
        "policy": {"name": policy},
        "log_level": "warning",
        "workers": [{"name": f"engine-{i}", "url": url} for i, url in enumerate(urls)],
    }
    file = folder.path / f"{policy}.yaml"
    file.write_bytes(msgspec.yaml.encode(config))
    command = ["-m", "hotprefix.cli", "gateway", "--config", str(file)]
    return Part(policy, _url(port), "/ready", _child(stack, folder, policy, command))


def wait_up(parts: Sequence[Part]) -> None:
    """Returns when all are healthy; raises CommandError with a log's tail when one is not."""
    for part in parts:
        child = part.child

        def settled(part: Part = part) -> bool:
            return part.child.exit_code is not None or _answers(part.url + part.health)

        if not wait_until(settled, _READY_S) or child.exit_code is not None:
            raise CommandError(f"{part.name} did not start; its log:\n{child.tail()}")


def _child(stack: ExitStack, folder: RunFolder, name: str, arguments: Sequence[str]) -> Child:
    command = [sys.executable, *arguments]
    child = Child(command, log=folder.path / f"{name}.log", folder=folder, env=_environment())
    stack.callback(child.stop)
    return child


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _port(stack: ExitStack) -> int:
    held = Port()
    stack.callback(held.close)
    return held.number


def _environment() -> dict[str, str]:
    """Ours without what would change the gateway's configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOTPREFIX_")}
    return {**kept, "PYTHONPATH": str(_ROOT), "TRANSFORMERS_VERBOSITY": "error"}


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command."""
    parser = argparse.ArgumentParser(
        prog="hotprefix bench gateway", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=5, help="windows per arm and case (5)")
    parser.add_argument("--requests", type=int, default=2000, help="most requests in a window (2000)")
    parser.add_argument("--seconds", type=float, default=3.0, help="longest window (3)")
    parser.add_argument(
        "--warmup", type=int, default=64, help="requests before a window that do not count (64)"
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="CASE")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Entry of ``hotprefix bench gateway``: 0, or 1 if a claim does not hold."""
    options = parse(argv)
    return show(run(options), "CPU µs per request", options.json)
