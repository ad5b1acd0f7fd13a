"""Two real engines and a node: KV computed by one is the other's, byte for byte, over restarts and lost nodes.

The engines start before the node. Each test has prompts of its own; the first answer is checked against the
same question asked again, which the engine's own cache answers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from hotprefix.engines import Engine, EngineSpec, Fleet, allowed_cores, core_shares
from hotprefix.home import Home
from hotprefix.local_node import LocalNode
from hotprefix.processes import wait_until
from hotprefix.progress import say_error

BLOCK = 32
NODE_BYTES = 1 << 30


class Said(NamedTuple):
    text: str
    tokens: int
    cached: int


class Setup(NamedTuple):
    engines: list[Engine]
    node: LocalNode


def ask(engine: Engine, prompt: str | list[int], answer: int = 16) -> Said:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": answer, "temperature": 0}
    answered = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120.0)
    answered.raise_for_status()
    said = answered.json()
    details = said["usage"]["prompt_tokens_details"]
    return Said(
        said["choices"][0]["text"], said["usage"]["prompt_tokens"], details["cached_tokens"] if details else 0
    )


def tokens_of(engine: Engine, text: str) -> list[int]:
    answered = httpx.post(f"{engine.url}/tokenize", json={"model": "smollm2", "prompt": text}, timeout=30.0)
    answered.raise_for_status()
    tokens: list[int] = answered.json()["tokens"]
    return tokens


def whole(tokens: int) -> int:
    """Tokens of the full blocks that can be cached of a prompt."""
    return (tokens - 1) // BLOCK * BLOCK


def status(node: LocalNode) -> dict[str, Any]:
    answered = httpx.get(f"{node.url}/v1/status", timeout=10.0)
    answered.raise_for_status()
    found: dict[str, Any] = answered.json()
    return found


def served(node: LocalNode) -> bool:
    """Whether both engines have a session."""
    return {worker for worker, _ in status(node)["serves"]} == {"n1", "n2"}


def stored(node: LocalNode, blocks: int) -> Callable[[], bool]:
    """So many blocks more are held than now, and nothing is on its way."""
    wanted = status(node)["figures"]["blocks"] + blocks

    def look() -> bool:
        figures = status(node)["figures"]
        return bool(figures["blocks"] >= wanted and not figures["reserved"])

    return look


@pytest.fixture(scope="module")
def setup(home: Home, model_path: str) -> Iterator[Setup]:
    """Engines first, then the node: they serve without one, and pick it up."""
    with Fleet(home, home.logs / "tests") as fleet:
        socket = str(fleet.folder.path / "node.sock")
        for number, cores in enumerate(core_shares(2, allowed_cores()), 1):
            spec = EngineSpec(
                name=f"n{number}", model=model_path, cores=cores, dev_mode=True, events=False, node=socket
            )
            fleet.start_engine(spec)
        fleet.wait_healthy(600.0, say_error)
        assert ask(fleet.engines[0], "Nobody is there yet, and the engine answers all the same. " * 4).text
        node = LocalNode(fleet.folder, fleet.logs, memory_bytes=NODE_BYTES)
        try:
            assert node.socket == socket
            node.wait_ready()
            assert wait_until(lambda: served(node), 30.0)
            yield Setup(fleet.engines, node)
        finally:
            node.stop()


def test_another_engine_reads_what_one_has_computed(setup: Setup, fresh: Callable[[int], str]) -> None:
    (first, second), node = setup
    prompt = fresh(400)
    there = stored(node, 10)
    cold = ask(first, prompt)
    assert cold.cached == 0
    assert wait_until(there, 10.0)
    local, other = ask(first, prompt), ask(second, prompt)
    assert cold.text == local.text == other.text
    assert local.cached == other.cached == whole(cold.tokens)


def test_another_question_recomputes_less_than_a_block(setup: Setup, fresh: Callable[[int], str]) -> None:
    (first, second), node = setup
    document = tokens_of(first, fresh(900))[:1020]
    assert len(document) == 1020
    questions = [tokens_of(first, text) for text in (" What did she count?", " Who brought her maps?")]
    there = stored(node, 31)
    ask(first, document + questions[0])
    assert wait_until(there, 20.0)
    other = ask(second, document + questions[1])
    assert other.cached == 1020 // BLOCK * BLOCK
    assert other.text == ask(second, document + questions[1]).text


def test_a_restarted_engine_is_warm(setup: Setup, fresh: Callable[[int], str]) -> None:
    (first, second), node = setup
    prompt = fresh(400)
    there = stored(node, 10)
    before = ask(second, prompt)
    assert wait_until(there, 10.0)
    second.restart()
    second.wait_healthy()
    assert wait_until(lambda: served(node), 30.0)
    after = ask(second, prompt)
    assert (after.text, after.cached) == (before.text, whole(before.tokens))
    assert first.healthy()
    assert wait_until(lambda: not status(node)["figures"]["quarantined"], 10.0)


def test_engines_outlive_the_node_and_find_the_next_one(setup: Setup, fresh: Callable[[int], str]) -> None:
    (first, second), node = setup
    prompt = fresh(400)
    before = ask(first, prompt)
    node.kill()
    assert ask(second, prompt).text == before.text, "computed, as if there were no cache"
    assert ask(first, prompt).cached == whole(before.tokens), "its own cache is its own"
    node.restart()
    node.wait_ready()
    assert wait_until(lambda: served(node), 30.0)
    assert status(node)["figures"]["blocks"] == 0
    another = fresh(400)
    there = stored(node, 10)
    cold = ask(second, another)
    assert wait_until(there, 10.0)
    other = ask(first, another)
    assert (other.text, other.cached) == (cold.text, whole(cold.tokens))
