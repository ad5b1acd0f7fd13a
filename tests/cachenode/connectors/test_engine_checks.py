"""What the connector reads of vLLM's own configuration objects and tensors, checked in an engine's Python."""

from typing import Any

import pytest

from tests.cachenode.connectors.conftest import Run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(in_engine: Run) -> dict[str, Any]:
    result: dict[str, Any] = in_engine("engine_checks")
    return result


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("none", ""),
        ("hybrid", "hybrid models"),
        ("windows", "hybrid models"),
        ("window", "SlidingWindowSpec is not supported"),
        ("mamba", "MambaSpec is not supported"),
        ("block", "choose another --block-size"),
        ("pipeline", "--pipeline-parallel-size must be 1"),
        ("machines", "--nnodes must be 1"),
        ("context", "context parallelism"),
        ("policy", 'write "kv_load_failure_policy": "recompute"'),
        ("unknown", "did you mean hotprefix.socket?"),
    ],
)
def test_what_cannot_work_is_refused_at_start(found: dict[str, Any], setup: str, message: str) -> None:
    said = found["refusals"][setup]
    assert message in said
    assert bool(message) == bool(said)


def test_the_layout_is_the_engines_own(found: dict[str, Any]) -> None:
    layouts = found["layouts"]
    layout = layouts["layout"]
    assert (layout["family"], layout["model"], layout["layers"]) == ("vllm", "smollm2", 4)
    assert (layout["heads"], layout["head_size"], layout["block_tokens"]) == (3, 64, 32)
    assert layout["block_bytes"] == 4 * 32 * 3 * 2 * 64 * 2
    assert layouts["same"]
    assert layouts["different"], "block size, dtype and layers make another layout"
    assert (layouts["blocks"], layouts["worker"]) == (6, "e1")


def test_blocks_move_between_caches_of_every_physical_layout(found: dict[str, Any]) -> None:
    assert len(found["views"]) >= 8
    assert all(found["views"].values()), found["views"]


def test_slots_of_the_gpu_path_are_used_again_only_when_free(found: dict[str, Any]) -> None:
    assert found["gpu"]


def test_vllm_sees_the_hybrid_allocator_supported(found: dict[str, Any]) -> None:
    assert found["hma"]


def test_ranks_end_a_load_together_and_one_bad_block_is_bad(found: dict[str, Any]) -> None:
    first, second = found["ranks"]["steps"]
    assert first == [[], [7], [[1, 2], [2, 1]], [2]]
    assert second == [["r1"], [], [], []]
