"""Two real vLLM engines for the whole session, started once (about half a minute, 6.4 GiB together).

Every test in this folder carries the mark ``engines``. Tests share the engines' caches: begin each with a
text of its own (``fresh``) and nothing is cached. ``spare`` starts an engine of the test's own.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from hotprefix.engine_env import ensure_engine
from hotprefix.engines import Engine, EngineSpec, Fleet, allowed_cores, core_shares
from hotprefix.errors import NoEngine
from hotprefix.home import Home, find_home
from hotprefix.model import ensure_model
from hotprefix.progress import say_error

SERVED_NAME = "smollm2"
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def home() -> Home:
    return find_home()


@pytest.fixture(scope="session")
def model_path(home: Home) -> str:
    """SmolLM2-135M-Instruct as an ordinary model folder."""
    try:
        ensure_engine(home, say_error)
        return ensure_model(home, "smollm2", say_error)
    except NoEngine as reason:
        pytest.skip(f"no engine: {reason}")


@pytest.fixture(scope="session")
def fleet(home: Home, model_path: str) -> Iterator[Fleet]:
    """``fleet.engines[0]`` and ``[1]``: block 32, 1 GiB of KV each, events with replay, dev mode."""
    with Fleet(home, home.logs / "tests") as started:
        for number, cores in enumerate(core_shares(2, allowed_cores()), 1):
            started.start_engine(_spec(f"e{number}", model_path, cores))
        started.wait_healthy(600.0, say_error)
        yield started


@pytest.fixture
def engines(fleet: Fleet) -> list[Engine]:
    """Both engines, healthy: those that an earlier test ended are started again."""
    for engine in fleet.engines:
        if not engine.healthy():
            engine.restart()
    fleet.wait_healthy(600.0)
    return list(fleet.engines)


@pytest.fixture
def cold(engines: list[Engine]) -> list[Engine]:
    """Both engines with empty caches; their events say ``AllBlocksCleared``."""
    for engine in engines:
        httpx.post(f"{engine.url}/reset_prefix_cache", timeout=30.0).raise_for_status()
    return engines


@pytest.fixture
def engine_url(engines: list[Engine]) -> str:
    """Base URL of the first engine."""
    return engines[0].url


@pytest.fixture
def spare(home: Home, model_path: str) -> Iterator[Callable[..., Engine]]:
    """Starts an engine of the test's own (``spare(blocks=140)``), healthy on return, ended with the test."""
    with Fleet(home, home.logs / "tests") as own:

        def start(**fields: object) -> Engine:
            spec = _spec(f"spare{len(own.engines) + 1}", model_path, ())
            engine = own.start_engine(msgspec.structs.replace(spec, **fields))
            own.wait_healthy(600.0)
            return engine

        yield start


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Callable[[int], str]:
    """Natural text of about so many words that no other test sends, so that nothing of it is cached."""
    numbers = itertools.count()

    def text(words: int) -> str:
        opening = f"Notes of {request.node.nodeid}, part {next(numbers)}. "
        return opening + " ".join(itertools.islice(itertools.cycle(_PROSE.split()), words))

    return text


def _spec(name: str, model_path: str, cores: tuple[int, ...]) -> EngineSpec:
    return EngineSpec(name=name, model=model_path, served_name=SERVED_NAME, cores=cores, dev_mode=True)


_PROSE = """The harbour master kept two ledgers, one for the ships that came and one for those that did not.
Every evening she walked the length of the pier with a lamp, counted the masts against the sky, and wrote
down what she saw before the tide could change it. Visitors asked why she trusted ink more than memory. She
would answer that memory is a kind guest who tidies the house, while ink leaves the cups where they stood.
In spring the fishermen brought her maps with corners missing, and she drew the coast again from soundings,
bells, and the habits of gulls."""
