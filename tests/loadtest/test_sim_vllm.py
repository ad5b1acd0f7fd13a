"""The simulated cache says, block by block, what vLLM's own cache manager says."""

import os
import subprocess
from pathlib import Path

import pytest

from hotprefix.engine_env import ensure_engine
from hotprefix.errors import NoEngine
from hotprefix.home import find_home
from hotprefix.progress import say_error
from loadtest.harness import ROOT

SCENARIOS = 100


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_the_cache_announces_what_vllms_does() -> None:
    home = find_home()
    try:
        ensure_engine(home, say_error)
    except NoEngine as reason:
        pytest.skip(f"no engine: {reason}")
    oracle = Path(__file__).with_name("vllm_oracle.py")
    done = subprocess.run(
        [home.engine / "bin" / "python", oracle, str(SCENARIOS)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 10_000
