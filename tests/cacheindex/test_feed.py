"""What is believed of a source, whatever happens to its batches on the way."""

from typing import Any

import pytest

from cacheindex.actions import Action, Apply, Forget, Limits, Resync
from cacheindex.feed import Feed
from cacheindex.pending import Numbered


def number(seq: int, life: int = 0) -> Numbered[int]:
    return Numbered(seq, seq, hash((seq, life)), 10)


def short(actions: list[Action[int]]) -> list[Any]:
    """Applied bodies, Resync numbers, and the names of the rest."""
    out: list[Any] = []
    for action in actions:
        if isinstance(action, Apply):
            out.append(action.body)
        elif isinstance(action, Resync):
            out.append(f"resync {action.from_seq}")
        else:
            out.append("forget" if isinstance(action, Forget) else "ignore")
    return out


def live(feed: Feed[int], *seqs: int, now: float = 0.0, life: int = 0) -> list[Any]:
    return [part for seq in seqs for part in short(feed.live(number(seq, life), now))]


def replay(feed: Feed[int], *seqs: int, now: float = 0.0, life: int = 0) -> list[Any]:
    out = [part for seq in seqs for part in short(feed.replayed(number(seq, life), now))]
    return out + short(feed.replay_ended(now))


def exact(replays: bool = True) -> Feed[int]:
    feed: Feed[int] = Feed(replays=replays)
    live(feed, 0, 1, 2)
    assert feed.trust == "exact"
    return feed


# ---- first contact ----


def test_the_first_batch_of_all_needs_no_history() -> None:
    feed: Feed[int] = Feed(replays=False)
    assert (feed.trust, feed.reason) == ("syncing", "not connected")
    assert live(feed, 0, 1) == [0, 1]
    assert (feed.trust, feed.reason, feed.last_seq) == ("exact", "", 1)


def test_joining_late_without_replay_is_suspect_and_counts() -> None:
    feed: Feed[int] = Feed(replays=False)
    assert live(feed, 7, 8) == [7, 8]
    assert (feed.trust, feed.reason) == ("suspect", "joined at batch 7, and there is no replay")
    feed.settled()
    assert feed.trust == "exact"


def test_joining_late_fetches_all() -> None:
    feed: Feed[int] = Feed(replays=True)
    assert short(feed.on_connected(0.0)) == ["resync 0"]
    assert live(feed, 3) == []
    assert feed.trust == "syncing"
    assert replay(feed, 0, 1, 2, 3) == [0, 1, 2, 3, "ignore"]
    assert live(feed, 3, 4) == ["ignore", 4]
    assert feed.trust == "exact"


def test_a_silent_source_is_known_to_have_said_nothing() -> None:
    feed: Feed[int] = Feed(replays=True)
    feed.on_connected(0.0)
    assert replay(feed) == []
    assert (feed.trust, feed.last_seq) == ("exact", None)


def test_incomplete_history_is_suspect() -> None:
    feed: Feed[int] = Feed(replays=True)
    assert live(feed, 9) == ["resync 0"]
    assert replay(feed, 5, 6, 7, 8, 9) == [5, 6, 7, 8, 9, "ignore"]
    assert (feed.trust, feed.reason) == ("suspect", "history begins at batch 5")


def test_history_that_never_comes() -> None:
    feed: Feed[int] = Feed(replays=True)
    live(feed, 9, 10)
    assert short(feed.tick(1.0)) == []
    assert short(feed.tick(3.0)) == [9, 10]
    assert (feed.trust, feed.reason) == ("suspect", "no answer to a replay")
    # It is asked for again later, and then all is rebuilt.
    assert short(feed.tick(60.0)) == ["resync 0"]
    assert short(feed.replayed(number(0), 60.0)) == ["forget", 0]
    assert replay(feed, *range(1, 11)) == list(range(1, 11))
    assert feed.trust == "exact"


# ---- gaps, duplicates, order ----


def test_a_gap_is_fetched() -> None:
    feed = exact()
    assert live(feed, 5, 6) == ["resync 3"]
    assert (feed.trust, feed.reason, feed.gaps) == ("suspect", "waiting for batch 3", 1)
    assert replay(feed, 3, 4, 5, 6) == [3, 4, 5, 6, "ignore", "ignore"]
    assert feed.trust == "exact"


def test_a_late_batch_fills_the_gap_itself() -> None:
    for replays in (True, False):
        feed = exact(replays)
        live(feed, 4, now=1.0)
        assert live(feed, 3, now=1.1) == [3, 4]
        assert feed.trust == "exact"


def test_duplicates_are_dropped() -> None:
    feed = exact()
    assert live(feed, 1, 2, 2, 3) == ["ignore", "ignore", "ignore", 3]
    assert feed.trust == "exact"


def test_a_lost_batch_without_replay_is_given_up() -> None:
    feed = exact(replays=False)
    assert live(feed, 4, 5, now=1.0) == []
    assert short(feed.tick(1.2)) == []
    assert short(feed.tick(2.0)) == ["forget", 4, 5]
    assert (feed.trust, feed.reason) == ("suspect", "batch 3 is lost")
    assert live(feed, 6, now=2.0) == [6]


def test_a_flood_behind_a_gap_is_given_up_at_once() -> None:
    feed = exact(replays=False)
    out = live(feed, *range(4, 4 + Limits().reorder_batches))
    assert out == ["forget", *range(4, 4 + Limits().reorder_batches)]


def test_a_replay_that_cannot_fill_the_gap() -> None:
    feed = exact()
    live(feed, 9)
    assert replay(feed, 6, 7, 8, 9) == ["forget", 6, 7, 8, 9, "ignore"]
    assert (feed.trust, feed.reason) == ("suspect", "batches 3 to 5 are lost")


def test_a_replay_with_holes_is_asked_again_and_then_given_up() -> None:
    feed = exact()
    live(feed, 9)
    assert replay(feed, 3, 4, 6, 7, 9, now=1.0) == [3, 4, "ignore"]
    assert short(feed.tick(1.2)) == ["resync 5"]
    assert replay(feed, now=1.3) == []
    assert short(feed.tick(1.5)) == ["resync 5"]
    assert replay(feed, now=1.6)[:3] == ["forget", 6, 7]
    assert feed.trust == "suspect"


def test_pending_is_bounded_and_what_did_not_fit_is_fetched() -> None:
    feed: Feed[int] = Feed(replays=True, limits=Limits(pending_batches=10))
    live(feed, 0)
    out = live(feed, *range(2, 50))
    assert out == ["resync 1", *["ignore"] * 38]
    assert replay(feed, 1) == list(range(1, 12))
    assert live(feed, 50, now=1.0) == ["resync 12"]
    assert replay(feed, *range(12, 51), now=1.0)[-1] == "ignore"
    assert (feed.trust, feed.last_seq) == ("exact", 50)


def test_quiet_is_questioned_once() -> None:
    feed = exact()
    assert short(feed.tick(1.0)) == []
    assert short(feed.tick(2.5)) == ["resync 3"]
    assert feed.trust == "exact"
    assert replay(feed, 3, now=2.6) == [3]
    assert short(feed.tick(9.0)) == []


# ---- lives ----


@pytest.mark.parametrize("seq", [0, 1, 2])
def test_numbers_that_begin_again_are_a_new_epoch(seq: int) -> None:
    feed = exact(replays=False)
    assert live(feed, seq, life=1) == ["forget", seq]
    assert feed.trust == ("exact" if seq == 0 else "suspect")
    assert feed.epochs == 2


def test_a_lost_connection_is_a_new_epoch_even_if_the_numbers_go_on() -> None:
    feed = exact()
    assert short(feed.on_disconnected(1.0)) == ["forget"]
    assert (feed.trust, feed.reason) == ("syncing", "not connected")
    assert short(feed.on_connected(2.0)) == ["resync 0"]
    assert replay(feed, 0, 1, 2, 3, life=1) == [0, 1, 2, 3]
    assert live(feed, 4, life=1) == [4]
    assert feed.trust == "exact"


def test_a_report_from_outside_is_a_new_epoch() -> None:
    feed = exact()
    assert short(feed.new_epoch("restarted", 1.0)) == ["forget", "resync 0"]


def test_a_replay_from_another_life_is_noticed() -> None:
    feed = exact()
    live(feed, 5)
    assert short(feed.replayed(number(2, life=1), 0.0)) == ["forget", "resync 0"]


def test_late_answers_of_an_earlier_life_are_ignored() -> None:
    feed = exact()
    live(feed, 5)
    feed.on_disconnected(1.0)
    assert replay(feed, 3, 4) == ["ignore", "ignore"]


# ---- trust ----


def test_silence_says_nothing() -> None:
    feed: Feed[int] = Feed(replays=False)
    live(feed, 0)
    feed.tick(100.0)
    assert feed.trust == "exact"


def test_wrong_predictions_demote_and_right_ones_promote() -> None:
    feed = exact()
    for agreed in (False, True, True, True, False, True, True):
        assert feed.outcome(agreed, 1.0) == []
    assert short(feed.outcome(False, 1.0)) == ["resync 0"]
    assert (feed.trust, feed.reason) == ("suspect", "3 of the last 8 predictions were wrong")
    assert replay(feed, 0, 1, 2, now=1.0) == ["forget", 0, 1, 2]
    for _ in range(7):
        feed.outcome(True, 2.0)
        assert feed.trust == "suspect"
    feed.outcome(True, 2.0)
    assert feed.trust == "exact"
    # Again, but within the cool-down: demoted, and not rebuilt.
    assert [feed.outcome(False, 3.0) for _ in range(3)] == [[], [], []]
    assert feed.trust == "suspect"


def test_wrong_ones_spread_thin_are_borne() -> None:
    feed = exact()
    for turn in range(60):
        feed.outcome(turn % 4 != 0, 1.0)
        assert feed.trust == "exact"


def test_unusable_until_a_new_epoch() -> None:
    feed = exact()
    assert short(feed.unusable("odd blocks")) == ["forget"]
    assert (feed.trust, feed.reason) == ("learned", "odd blocks")
    assert live(feed, 3) == ["ignore"]
    assert feed.outcome(False, 1.0) == []
    feed.new_epoch("restarted", 2.0)
    live(feed, 0, life=1, now=2.0)
    assert feed.trust == "exact"
