"""Batches of a node into decisions: order, lives, questions, silence."""

from itertools import pairwise

import pytest

from cacheindex.actions import Apply, Forget, Ignore, Limits, Resync
from cacheindex.node_feed import NodeAction, NodeFeed
from cacheindex.pending import Numbered


def number(seq: int, size: int = 1) -> Numbered[int]:
    return Numbered(seq, seq, 0, size)


def short(actions: list[NodeAction[int]]) -> list[str]:
    words = []
    for action in actions:
        if isinstance(action, Apply):
            words.append(f"apply {action.body}")
        elif isinstance(action, Resync):
            words.append(f"replay {action.from_seq}")
        elif isinstance(action, Ignore):
            words.append(action.why)
        else:
            words.append("forget" if isinstance(action, Forget) else "refill")
    return words


class Fed:
    """A feed with one clock, in one life unless said otherwise."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.feed: NodeFeed[int] = NodeFeed(limits=limits)
        self.now = 0.0

    def connect(self) -> list[str]:
        return short(self.feed.on_connected(self.now))

    def live(self, seq: int, epoch: str = "a") -> list[str]:
        return short(self.feed.live(number(seq), epoch, self.now))

    def answer(self, seq: int, epoch: str = "a") -> list[str]:
        return short(self.feed.answered(number(seq), epoch, self.now))

    def end(self) -> list[str]:
        return short(self.feed.answers_ended(self.now))

    def tick(self, passed: float) -> list[str]:
        self.now += passed
        return short(self.feed.tick(self.now))


@pytest.fixture
def fed() -> Fed:
    """Connected, told everything up to batch 5."""
    fed = Fed()
    assert fed.connect() == ["refill"]
    assert fed.answer(5) == ["forget", "apply 5"]
    assert fed.answer(5) == ["apply 5"]
    assert fed.end() == []
    fed.now = 1.0
    return fed


def test_what_came_meanwhile_follows_what_was_told() -> None:
    fed = Fed()
    assert (fed.feed.trust, fed.feed.reason) == ("syncing", "not connected")
    fed.connect()
    assert fed.live(4) == []
    assert fed.live(6) == []
    assert fed.answer(5) == ["forget", "apply 5"]
    assert fed.live(7) == []
    assert (fed.feed.trust, fed.feed.reason) == ("syncing", "fetching what it holds")
    assert fed.end() == ["apply 6", "apply 7"]
    assert (fed.feed.trust, fed.feed.reason, fed.feed.last_seq) == ("exact", "", 7)
    assert not fed.feed.asking


def test_batches_in_order_and_again(fed: Fed) -> None:
    assert fed.live(6) == ["apply 6"]
    assert fed.live(6) == ["duplicate"]
    assert fed.live(2) == ["duplicate"]
    assert fed.live(7) == ["apply 7"]
    assert fed.feed.trust == "exact"


def test_a_gap_is_replayed(fed: Fed) -> None:
    assert fed.live(8) == ["replay 6"]
    assert (fed.feed.trust, fed.feed.reason) == ("suspect", "waiting for batch 6")
    assert fed.live(9) == []
    assert fed.answer(6) == ["apply 6"]
    assert fed.answer(7) == ["apply 7", "apply 8", "apply 9"]
    assert fed.answer(8) == ["applied already"]
    assert fed.end() == []
    assert (fed.feed.trust, fed.feed.gaps, fed.feed.replays) == ("exact", 1, 1)


def test_what_is_late_fills_the_gap(fed: Fed) -> None:
    assert fed.live(7) == ["replay 6"]
    assert fed.live(6) == ["apply 6", "apply 7"]
    assert fed.answer(6) == ["applied already"]
    assert fed.end() == []
    assert fed.feed.trust == "exact"


def test_a_replay_that_begins_too_late_leads_to_all_it_holds(fed: Fed) -> None:
    assert fed.live(9) == ["replay 6"]
    assert fed.answer(8) == ["refill"]
    assert fed.answer(9) == ["forget", "apply 9"]
    assert fed.end() == []
    assert (fed.feed.trust, fed.feed.last_seq) == ("exact", 9)


@pytest.mark.parametrize("answers", [[], [6], [6, 8]])
def test_a_replay_with_a_hole_leads_to_all_it_holds(fed: Fed, answers: list[int]) -> None:
    fed.live(9)
    for seq in answers:
        fed.answer(seq)
    assert fed.end() == []
    assert fed.feed.trust == "suspect"
    assert fed.tick(0.2) == ["refill"]


def test_a_replay_without_an_answer_leads_to_all_it_holds(fed: Fed) -> None:
    assert fed.live(9) == ["replay 6"]
    assert fed.tick(1.9) == []
    assert fed.tick(0.2) == []
    fed.live(10)
    assert fed.tick(1.1) == ["refill"]
    assert fed.answer(10) == ["forget", "apply 10"]
    fed.end()
    assert fed.feed.trust == "exact"


def test_heartbeats_show_a_loss_at_the_end(fed: Fed) -> None:
    assert short(fed.feed.said(5, fed.now)) == []
    assert short(fed.feed.said(6, fed.now)) == ["replay 6"]
    assert short(fed.feed.said(7, fed.now)) == []
    assert fed.answer(6) == ["apply 6"]
    assert fed.answer(7) == ["apply 7"]
    fed.end()
    assert (fed.feed.trust, fed.feed.gaps) == ("exact", 1)


def test_another_life(fed: Fed) -> None:
    assert fed.live(0, "b") == ["forget", "refill"]
    assert (fed.feed.trust, fed.feed.epoch, fed.feed.epochs) == ("syncing", "b", 2)
    assert fed.live(6, "a") == ["past epoch"]
    assert fed.answer(0, "b") == ["forget", "apply 0"]
    assert fed.end() == []
    assert fed.live(1, "b") == ["apply 1"]


def test_an_answer_can_be_the_first_of_another_life(fed: Fed) -> None:
    fed.live(8)
    assert fed.answer(0, "b") == ["forget", "refill"]
    assert fed.answer(0, "b") == ["forget", "apply 0"]
    fed.end()
    assert fed.feed.trust == "exact"


def test_only_the_living_answer(fed: Fed) -> None:
    """A late word of an earlier life, never heard of before, came after the first of this one."""
    assert fed.live(3, "dead") == ["forget", "refill"]
    assert fed.live(6) == ["past epoch"]
    assert fed.answer(6) == ["forget", "refill"]
    assert fed.answer(6) == ["forget", "apply 6"]
    fed.end()
    assert (fed.feed.trust, fed.feed.epoch) == ("exact", "a")
    assert fed.live(4, "dead") == ["past epoch"]


def test_a_lost_connection_forgets(fed: Fed) -> None:
    assert short(fed.feed.on_disconnected(fed.now)) == ["forget"]
    assert (fed.feed.trust, fed.feed.reason) == ("syncing", "not connected")
    assert fed.tick(60.0) == []
    assert fed.feed.trust == "syncing", "its silence is no news"
    assert fed.connect() == ["refill"]
    assert fed.answer(5) == ["forget", "apply 5"]
    fed.end()
    assert (fed.feed.trust, fed.feed.epochs) == ("exact", 1)


def test_a_doubt_from_outside_asks_again(fed: Fed) -> None:
    assert short(fed.feed.new_epoch("a fault of ours", fed.now)) == ["forget", "refill"]


def test_silence(fed: Fed) -> None:
    fed.live(6)
    assert fed.tick(2.9) == []
    assert fed.feed.trust == "exact"
    fed.tick(0.2)
    assert (fed.feed.trust, fed.feed.reason) == ("suspect", "no heartbeat")
    fed.live(7)
    assert fed.feed.trust == "exact"


def test_all_it_holds_must_be_of_one_moment() -> None:
    fed = Fed()
    fed.connect()
    fed.answer(5)
    assert fed.answer(6) == ["forget"]
    assert fed.answer(6) == ["late answer"]
    assert (fed.feed.trust, fed.feed.asking) == ("syncing", False)
    assert fed.tick(1.1) == ["refill"]


def test_half_of_what_it_holds_is_not_kept() -> None:
    fed = Fed()
    fed.connect()
    fed.answer(5)
    assert fed.tick(2.1) == ["forget"]
    assert fed.tick(0.5) == []
    assert fed.tick(0.6) == ["refill"]


def test_nobody_who_answers_is_asked_more_and_more_rarely() -> None:
    fed = Fed()
    asked = [0.0] if fed.connect() else []
    while fed.now < 300:
        fed.feed.live(number(int(fed.now)), "a", fed.now)
        if "refill" in fed.tick(0.5):
            asked.append(fed.now)
    waits = [after - before for before, after in pairwise(asked)]
    assert waits == sorted(waits)
    assert 30 <= waits[-1] <= 33
    assert (fed.feed.trust, fed.feed.asking) == ("syncing", False) or fed.feed.asking


def test_an_answer_of_nothing_is_no_answer() -> None:
    fed = Fed()
    fed.connect()
    assert fed.end() == []
    assert fed.feed.trust == "syncing"
    assert fed.tick(1.1) == ["refill"]


def test_what_waits_is_bounded() -> None:
    fed = Fed(Limits(pending_batches=3, pending_bytes=1000))
    fed.connect()
    assert [fed.live(seq) for seq in (6, 7, 7, 8, 9)] == [[], [], ["duplicate"], [], ["too many pending"]]
    fed.answer(5)
    assert fed.end() == ["apply 6", "apply 7", "apply 8"]
    fed.now += 1
    assert fed.live(10) == ["replay 9"]
