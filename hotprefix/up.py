"""``hotprefix up``: engines, a cache node and a gateway on this machine, started and stopped together."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from hotprefix import settings
from hotprefix.engine_env import ensure_engine
from hotprefix.engines import Engine, EngineSpec, Fleet, Part, allowed_cores, core_shares, wait_all
from hotprefix.errors import UserError
from hotprefix.home import Home, find_home
from hotprefix.local_gateway import LocalGateway, gateway_environ
from hotprefix.local_node import LocalNode
from hotprefix.model import DEFAULT_MODEL, ensure_model, resolve, served_name
from hotprefix.processes import Port
from hotprefix.progress import Board, say_error
from loadtest.tinymodel import write_tiny_model

_START_S = 600.0
_LOOK_S = 0.5
_RESTART_S = 5.0
"""An engine that was healthy no longer than this would only end again."""
_SIM_SPEEDS = ("--prefill-rate", "2000", "--decode-rate", "50")
"""About what SmolLM2 reaches on two cores."""


def main(arguments: Sequence[str]) -> int:
    """Runs until Ctrl-C, SIGTERM, or the end of the gateway or of the last engine."""
    options, gateway_flags = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    loaded = settings.load([*gateway_flags, "--workers", "http://127.0.0.1:1"], gateway_environ())
    for number in (options.port, options.admin_port):
        Port(number).close()  # a taken port is said before anything is set up or started
    home = find_home()
    specs = _specs(options, home, loaded.config.secret_file)
    with Fleet(home) as fleet:
        node: LocalNode | None = None
        gateway: LocalGateway | None = None
        try:
            if _wants_node(options):
                node = LocalNode(fleet.folder, fleet.logs, memory_bytes=options.node_gib << 30)
            gateway = _start(fleet, specs, node, options, gateway_flags)
            return _watch(fleet, gateway, node, _RESTART_S if options.restart else None)
        except KeyboardInterrupt:
            return 130
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            say_error("stopping …")
            if gateway is not None:
                gateway.stop()
            fleet.stop_engines()
            if node is not None:
                node.stop()
            fleet.stop()
            say_error("stopped")


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="hotprefix up",
        description="Start engines, a cache node and a gateway on this machine; Ctrl-C stops everything.",
        epilog="Further flags are the gateway's, see hotprefix gateway --help. Logs lie in .hotprefix/logs.",
    )
    parser.add_argument("--engines", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm", help="real or simulated (vllm)")
    parser.add_argument(
        "--model",
        default="",
        metavar="PATH|NAME",
        help="model folder or hub name (SmolLM2-135M-Instruct; simulated engines: a tiny tokenizer)",
    )
    parser.add_argument("--port", type=int, default=8000, help="the gateway's port, 0: any free one (8000)")
    parser.add_argument("--admin-port", type=int, default=8001, help="its admin port, 0: any free one (8001)")
    parser.add_argument("--policy", metavar="NAME", help="how a replica is chosen (prefix)")
    parser.add_argument("--block-size", type=int, default=32, help="an engine's block, tokens (32)")
    parser.add_argument("--kv-gib", type=int, default=1, help="KV cache of each engine, GiB (1)")
    parser.add_argument(
        "--kv-blocks", type=int, metavar="N", help="cap it at N blocks, to see what happens beyond"
    )
    parser.add_argument("--max-model-len", type=int, default=4096, help="longest prompt and answer (4096)")
    parser.add_argument(
        "--node-gib", type=int, default=2, metavar="N", help="memory of the cache node, GiB (2)"
    )
    parser.add_argument(
        "--no-node", action="store_true", help="no cache node (simulated engines never have one)"
    )
    parser.add_argument("--restart", action="store_true", help="start an engine that ended anew")
    parser.add_argument("--no-events", action="store_true", help="engines say nothing of their cache")
    options, rest = parser.parse_known_args(arguments)
    if not 1 <= options.engines <= 64:
        raise UserError(f"--engines is a number from 1 to 64, not {options.engines}")
    if options.block_size < 1 or options.kv_gib < 1 or options.max_model_len < 1:
        raise UserError("--block-size, --kv-gib and --max-model-len are positive numbers")
    if options.kv_blocks is not None and options.kv_blocks * options.block_size < options.max_model_len:
        least = -(-options.max_model_len // options.block_size)
        raise UserError(f"--kv-blocks {options.kv_blocks} holds no prompt of --max-model-len, {least} would")
    if options.node_gib < 1:
        raise UserError(f"--node-gib is a number from 1 on, not {options.node_gib}; --no-node starts none")
    if options.engine == "vllm" and options.block_size % 32:
        raise UserError(f"vLLM on CPU takes block sizes that are multiples of 32, not {options.block_size}")
    if options.policy is not None:
        rest += ["--policy", options.policy]
    return options, rest


def _wants_node(options: argparse.Namespace) -> bool:
    return options.engine == "vllm" and not options.no_node


def _specs(options: argparse.Namespace, home: Home, secret_file: str | None) -> list[EngineSpec]:
    """What to start; sets up the engine and the model first if they are needed and not there."""
    if options.engine == "vllm":
        ensure_engine(home, say_error)
        model = ensure_model(home, options.model or DEFAULT_MODEL, say_error)
    else:
        model = resolve(options.model) if options.model else str(write_tiny_model(home.models / "tiny"))
    base = EngineSpec(
        name="engine",
        kind=options.engine,
        model=model,
        served_name=served_name(model) if options.model else DEFAULT_MODEL,
        block_size=options.block_size,
        kv_gib=options.kv_gib,
        blocks=options.kv_blocks,
        max_model_len=options.max_model_len,
        events=not options.no_events,
        secret_file=None if secret_file is None else str(Path(secret_file).absolute()),
        extra=_SIM_SPEEDS if options.engine == "sim" else (),
    )
    shares = core_shares(options.engines, allowed_cores())
    return [
        msgspec.structs.replace(base, name=f"engine-{number}", cores=cores)
        for number, cores in enumerate(shares, 1)
    ]


def _start(
    fleet: Fleet,
    specs: Sequence[EngineSpec],
    node: LocalNode | None,
    options: argparse.Namespace,
    flags: Sequence[str],
) -> LocalGateway:
    """Everything at once; engines and gateway find each other and the node as each becomes ready."""
    beside = "a gateway" if node is None else "a cache node and a gateway"
    say_error(f"starting {len(specs)} engines ({options.engine}) and {beside}; logs in {fleet.logs}")
    nodes = [] if node is None else [node]
    for spec in specs:
        fleet.start_engine(msgspec.structs.replace(spec, node=None if node is None else node.socket))
    gateway = LocalGateway(
        fleet.engines,
        fleet.folder,
        fleet.logs,
        port=options.port,
        admin_port=options.admin_port,
        flags=flags,
        nodes=nodes,
    )
    try:
        parts: list[Part] = [*nodes, *fleet.engines, gateway]
        wait_all(parts, _START_S, Board(say_error, [part.name for part in parts]))
    except BaseException:
        gateway.stop(0.0)
        raise
    print(greeting(gateway.url, specs[0].served_name), flush=True)
    return gateway


def greeting(url: str, model: str) -> str:
    """What a user needs next: the base URL and a request that works."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    return (
        f"\nhotprefix is ready: base URL {url}/v1, model {model}\n\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n"
        "Ctrl-C stops everything.\n"
    )


def _watch(fleet: Fleet, gateway: LocalGateway, node: LocalNode | None, restart_s: float | None) -> int:
    """Until interrupted. The end of an engine or of the node is told, and the others go on without it; an
    engine that had been healthy for ``restart_s`` seconds is started again."""
    alive: dict[Engine, float | None] = dict.fromkeys(fleet.engines, time.monotonic())  # healthy since
    try:
        while alive:
            time.sleep(_LOOK_S)
            if gateway.exit_code is not None:
                say_error(f"gateway ended with status {gateway.exit_code}; its log:\n{gateway.tail()}")
                return 1
            if node is not None and node.exit_code is not None:
                say_error(f"node ended with status {node.exit_code}; its log:\n{node.tail()}")
                node = None
            for engine in [one for one, since in alive.items() if since is None and one.healthy()]:
                alive[engine] = time.monotonic()
            for engine in [engine for engine in alive if engine.exit_code is not None]:
                say_error(f"{engine.name} ended with status {engine.exit_code}; its log:\n{engine.tail()}")
                since = alive.pop(engine)
                if restart_s is not None and since is not None and time.monotonic() - since >= restart_s:
                    say_error(f"{engine.name} is started again")
                    engine.restart()
                    alive[engine] = None
        say_error("no engine is left")
        return 1
    except KeyboardInterrupt:
        return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
