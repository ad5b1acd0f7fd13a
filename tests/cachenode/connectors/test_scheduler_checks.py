"""Every rule of the connector under vLLM's own scheduler: random requests, aborts, preemptions, failed copies and
lost nodes, with KV whose every read is checked."""

from typing import Any

import pytest

from tests.cachenode.connectors.conftest import Run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
PLAYS = 8


@pytest.fixture(scope="module")
def plays(in_engine: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = in_engine("scheduler_checks", str(PLAYS))
    return found


def test_no_read_block_ever_held_other_bytes(plays: list[dict[str, Any]]) -> None:
    assert [play["wrong"] for play in plays] == [0] * PLAYS


def test_every_request_ends_and_nothing_stays_held(plays: list[dict[str, Any]]) -> None:
    for play in plays:
        assert play["requests"] == play["finished"] + play["aborted"]
        assert (play["left"], play["held"], play["leases"], play["open"]) == (0, 0, 0, 0)


def test_the_plays_met_what_they_are_for(plays: list[dict[str, Any]]) -> None:
    for what, least in (
        ("loads", 50),
        ("bad_loads", 10),
        ("stores", 100),
        ("preempted", 20),
        ("aborted", 50),
    ):
        assert sum(play[what] for play in plays) >= least, what
