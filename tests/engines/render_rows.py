"""Run by the engine's Python: renders requests with vLLM's own render server, without weights.

Reads from standard input ``{"setups": [{"model", "flags", "requests": [[path, body], …]}], "templates":
[text, …]}`` and prints ``{"answers": [[[status, answer], …], …], "formats": […]}``. The requests go
through the server's own HTTP routes; one process serves all set-ups because importing vLLM takes 17 s.
"""

import asyncio
import json
import sys
from typing import Any

from fastapi.testclient import TestClient
from vllm import AsyncEngineArgs, envs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.renderers.hf import _detect_content_format
from vllm.utils.argparse_utils import FlexibleArgumentParser


def answers(setup: dict[str, Any]) -> list[list[Any]]:
    flags = ["--model", setup["model"], "--max-model-len", "4096", *setup["flags"]]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    engine = AsyncEngineArgs.from_cli_args(args)
    config = VllmConfig(
        model_config=engine.create_model_config(),
        structured_outputs_config=engine.create_structured_outputs_config(),
    )
    app = build_app(args, ("render",))
    asyncio.run(init_render_app_state(config, app.state, args))
    with TestClient(app, raise_server_exceptions=False) as client:
        found = [client.post(path, json=body) for path, body in setup["requests"]]
    return [[answer.status_code, answer.json()] for answer in found]


def main() -> None:
    envs.VLLM_CPU_KVCACHE_SPACE = 0  # no engine, no cache
    asked = json.load(sys.stdin)
    found = [answers(setup) for setup in asked["setups"]]
    formats = [_detect_content_format(text, default="string") for text in asked["templates"]]
    print(json.dumps({"answers": found, "formats": formats}))


main()
