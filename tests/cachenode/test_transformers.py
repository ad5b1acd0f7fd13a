"""The transformers connector, run by the engine's Python (``transformers_rows.py``): with tiny caches and a
node in the same process, and with SmolLM2 and a real node.

Bit for bit on the CPU. What a cache holds depends on the shapes it was computed in, so the logits after a
restored prefix are those after the very cache that was saved; another prefill of the same text may differ in
the last bits from both (bfloat16 shows it), and that is the model's doing.
"""

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotprefix.engine_env import ensure_engine
from hotprefix.errors import NoEngine
from hotprefix.home import find_home
from hotprefix.model import ensure_model
from hotprefix.progress import say_error
from loadtest.harness import socket_folder, wait_until
from tests.cachenode.living import LivingNode

ROOT = Path(__file__).parents[2]
CHECKS = (
    "every_length_comes_back",
    "the_last_token_is_left_to_compute",
    "a_longer_text_adds_only_what_is_missing",
    "the_shorter_of_cache_and_tokens_counts",
    "what_differs_never_meets",
    "a_torn_record_is_a_miss_from_there_on",
    "a_node_without_room_keeps_the_beginning",
    "a_node_that_is_gone_is_a_miss",
    "another_session_is_another_memory",
    "what_cannot_be_written_whole_is_aborted",
    "unfit_caches_are_refused",
    "layouts_name_what_was_loaded",
    "prompts_without_names_are_refused",
    "a_container_apart_gets_the_same_bytes",
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


class Rows:
    """A child that answers; see ``transformers_rows.py``. Ends with its standard input."""

    def __init__(self, python: Path, log: Path) -> None:
        variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
        self._log = log
        with log.open("w") as errors:
            self._child = subprocess.Popen(
                [python, "-m", "tests.cachenode.transformers_rows"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | variables,
                cwd=ROOT,
                text=True,
            )

    def ask(self, do: str, **fields: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, self._log.read_text()[-3000:]
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        self._child.communicate(timeout=30)
        assert self._child.returncode == 0


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return ensure_engine(find_home(), say_error)
    except NoEngine as reason:
        pytest.skip(f"no engine: {reason}")


@pytest.fixture(scope="module")
def model_path(python: Path) -> str:
    return ensure_model(find_home(), "smollm2", say_error)


@pytest.fixture(scope="module")
def start(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Rows]]:
    """Starts another child, ended with the module."""
    started: list[Rows] = []

    def another() -> Rows:
        started.append(Rows(python, tmp_path_factory.mktemp("rows") / "log"))
        return started[-1]

    yield another
    for rows in started:
        rows.close()


@pytest.fixture(scope="module")
def rows(start: Callable[[], Rows]) -> Rows:
    return start()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with socket_folder() as path:
        yield path


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[LivingNode]:
    with LivingNode(folder / "n", 256 << 20) as living:
        yield living
        assert living.sound()


def text(seed: object, length: int) -> list[int]:
    return random.Random(str(seed)).choices(range(1_000, 40_000), k=length)


def test_every_check_is_run(rows: Rows) -> None:
    assert tuple(rows.ask("names")["names"]) == CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_with_tiny_caches(rows: Rows, name: str) -> None:
    assert rows.ask("check", name=name)["holds"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
class TestSmolLM2:
    """With the real model and a real node."""

    @pytest.fixture(autouse=True)
    def _loaded(self, rows: Rows, node: LivingNode, model_path: str, dtype: str) -> None:
        rows.ask("load", folder=model_path, dtype=dtype)
        rows.ask("keep", socket=node.path)

    @pytest.mark.parametrize("length", [32, 130, 300])
    def test_logits_are_equal_bit_for_bit(self, rows: Rows, dtype: str, length: int) -> None:
        self.check(rows, length, f"{dtype} {length}")

    def test_they_are_where_memory_cannot_be_mapped(
        self, start: Callable[[], Rows], node: LivingNode, model_path: str, dtype: str
    ) -> None:
        apart = start()
        apart.ask("load", folder=model_path, dtype=dtype)
        apart.ask("keep", socket=node.path, mode="copy")
        self.check(apart, 130, f"{dtype} container")
        apart.ask("leave")

    def check(self, rows: Rows, length: int, seed: str) -> None:
        said = rows.ask("equal", tokens=text(seed, length), rest=text(f"{seed} rest", 5))
        assert said["saved"] == said["restored"] == length // 32 * 32
        assert len(said["equal"]) == 5 + length % 32
        assert all(said["equal"])
        assert said["finite"]
        assert said["would_differ"]

    def test_another_process_restores_it(
        self, rows: Rows, start: Callable[[], Rows], node: LivingNode, model_path: str, dtype: str
    ) -> None:
        tokens, rest = text(f"{dtype} process", 100), text("rest", 5)
        said = rows.ask("equal", tokens=tokens, rest=rest)
        rows.ask("leave")
        second = start()
        loaded = second.ask("load", folder=model_path, dtype=dtype)
        assert second.ask("keep", socket=node.path) == loaded
        assert second.ask("follow", tokens=tokens, rest=rest) == {"restored": 96, "logits": said["logits"]}
        second.ask("leave")

    def test_generate_writes_the_same(self, rows: Rows, dtype: str) -> None:
        tokens = text(f"{dtype} generate", 97)
        assert rows.ask("save", tokens=tokens[:96])["saved"] == 96
        said = rows.ask("generate", tokens=tokens, count=8)
        assert said["restored"] == 96
        assert said["ours"] == said["own"]
        assert len(said["own"]) > 97

    def test_what_differs_never_meets(self, rows: Rows, node: LivingNode, dtype: str) -> None:
        tokens = text(f"{dtype} apart", 64)
        others: list[dict[str, Any]] = [
            {},
            {"model": "another"},
            {"layout": {"revision": "another"}},
            {"layout": {"block_tokens": 16}},
            {"adapter": "a", "adapter_digest": "1" * 64},
            {"adapter": "a", "adapter_digest": "2" * 64},
            {"salt": "one"},
            {"salt": "two"},
        ]
        for other in others:
            rows.ask("keep", socket=node.path, **other)
            assert rows.ask("held", tokens=tokens) == {"restored": 0}, other
            assert rows.ask("save", tokens=tokens) == {"saved": 64}, other
        for other in others:
            rows.ask("keep", socket=node.path, **other)
            assert rows.ask("held", tokens=tokens) == {"restored": 64}, other

    def test_what_was_cleared_is_a_miss(self, rows: Rows, node: LivingNode, dtype: str) -> None:
        tokens = text(f"{dtype} cleared", 64)
        rows.ask("save", tokens=tokens)
        node.clear()
        assert wait_until_held(rows, tokens, 0)
        assert rows.ask("save", tokens=tokens) == {"saved": 64}

    def test_what_was_evicted_is_a_miss(self, rows: Rows, folder: Path, dtype: str) -> None:
        """A memory of 9 blocks, or of 19: the first text is gone when the third has come."""
        with LivingNode(folder / "small", 14 << 20, eviction="lru") as small:
            rows.ask("keep", socket=small.path)
            first, *others = (text(f"{dtype} evicted {number}", 290) for number in range(3))
            assert rows.ask("equal", tokens=first, rest=[1])["restored"] == 288
            for other in others:
                said = rows.ask("equal", tokens=other, rest=[1])
                assert said["restored"] == 288
                assert all(said["equal"])
            assert rows.ask("held", tokens=first) == {"restored": 0}
            assert small.sound()
            rows.ask("leave")

    def test_a_node_may_come_and_go(self, rows: Rows, folder: Path, dtype: str) -> None:
        tokens = text(f"{dtype} gone", 64)
        for _ in range(2):
            with LivingNode(folder / "short", 16 << 20) as short:
                rows.ask("keep", socket=short.path)
                assert rows.ask("save", tokens=tokens) == {"saved": 64}
            assert rows.ask("held", tokens=tokens) == {"restored": 0}
            assert rows.ask("save", tokens=tokens) == {"saved": 0}
            with LivingNode(folder / "short", 16 << 20) as again:
                assert wait_until_saved(rows, tokens)
                assert rows.ask("held", tokens=tokens) == {"restored": 64}
                assert again.sound()
        rows.ask("leave")


def wait_until_held(rows: Rows, tokens: list[int], count: int) -> bool:
    wait_until(lambda: rows.ask("held", tokens=tokens)["restored"] == count, 10.0)
    return True


def wait_until_saved(rows: Rows, tokens: list[int]) -> bool:
    """The client reconnects when it is used, with a pause that grows."""
    wait_until(lambda: rows.ask("save", tokens=tokens)["saved"], 30.0)
    return True
