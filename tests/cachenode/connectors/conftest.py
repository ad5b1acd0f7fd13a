"""Runs a check script in an engine's Python, which has torch and vLLM; ours has neither."""

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from hotprefix.engine_env import ensure_engine
from hotprefix.errors import NoEngine
from hotprefix.home import checkout, find_home
from hotprefix.model import ensure_model
from hotprefix.progress import say_error

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def in_engine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``in_engine(module, *arguments)``: what the module's ``main`` prints last, as JSON; its first argument
    is the model folder."""
    home = find_home()
    try:
        ensure_engine(home, say_error)
        model = ensure_model(home, "smollm2", say_error)
    except NoEngine as reason:
        pytest.skip(f"no engine: {reason}")

    def run(module: str, *arguments: str) -> Any:
        script = f"from tests.cachenode.connectors.{module} import main; main()"
        done = subprocess.run(
            [str(home.engine / "bin" / "python"), "-c", script, model, *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(checkout()),
                "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            cwd=tmp_path_factory.mktemp("checks"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
