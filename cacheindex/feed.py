"""What to believe of one engine: numbers and lives of its batches in, decisions out. No I/O, no clock.

An engine numbers its batches from 0 in each of its lives, and does not say which life that is: a lost
connection, a report from outside, or numbers that begin again start a new *epoch*, and everything said
before is forgotten. ``node_feed`` is for sources that say more. Every call returns the actions to take,
in order.

What a caller may rely on: within an epoch, batches are applied once each, in the order of their
numbers, without a hole since the last ``Forget``. So what is known is never more than what the source
holds, and ``trust`` says whether it may be less.
"""

from collections import OrderedDict
from typing import Generic

import msgspec

from cacheindex.actions import Action, Apply, Forget, Ignore, Limits, Resync
from cacheindex.pending import Body, Numbered, Pending
from cacheindex.trust import Outcomes, Trust


class _Replay(msgspec.Struct):
    why: str
    started: float
    heard: float
    answers: int = 0
    applied: int = 0


_URGENCY = ("", "probe", "gap", "history", "rebuild")
"""Why a replay is wanted. ``probe``: was the last batch the last one? ``rebuild``: all from 0 on, what is
known is forgotten when the first answer comes."""


class Feed(Generic[Body]):
    """``replays``: the source can be asked for past batches.

    Counters for metrics: ``epochs`` begun, ``gaps`` seen, ``replays`` asked for."""

    def __init__(self, *, replays: bool, limits: Limits | None = None) -> None:
        self.epochs = 1
        self.gaps = 0
        self.replays = 0
        self._can_replay = replays
        self._limits = limits or Limits()
        self._connected = False
        self._cooldown = self._limits.cooldown_s
        self._replay_at = self._rebuild_at = float("-inf")
        self._unusable = ""
        self._out: list[Action[Body]] = []
        self._reset()

    def _reset(self) -> None:
        limits = self._limits
        self._expected: int | None = None
        self._first = 0
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._pending: Pending[Body] = Pending(limits.pending_batches, limits.pending_bytes)
        self._replay: _Replay | None = None
        self._attempts = 0
        self._wanted = ""
        self._gap_since: float | None = None
        self._heard: float | None = None
        self._unconfirmed = False
        self._doubts: dict[str, str] = {}
        self._outcomes = Outcomes(limits.window, limits.wrong)

    # ---- what is known ----

    @property
    def trust(self) -> Trust:
        if self._unusable:
            return "learned"
        if self._doubts:
            return "suspect"
        return "syncing" if self._expected is None or self._syncing else "exact"

    @property
    def reason(self) -> str:
        """Why ``trust`` is not exact, for people; "" where it is."""
        if self._unusable or self._doubts:
            return self._unusable or next(iter(self._doubts.values()))
        if not self._connected and self._expected is None:
            return "not connected"
        if self._syncing:
            return "fetching history"
        return "no batch yet" if self._expected is None else ""

    @property
    def last_seq(self) -> int | None:
        """The number of the batch applied last in this epoch."""
        return self._expected - 1 if self._expected else None

    @property
    def replaying(self) -> bool:
        """Whether answers to the last ``Resync`` are still wanted."""
        return self._replay is not None

    @property
    def _syncing(self) -> bool:
        whys = (self._wanted, self._replay.why if self._replay else "")
        return "history" in whys or "rebuild" in whys

    # ---- connections and lives ----

    def on_connected(self, now: float) -> list[Action[Body]]:
        self._connected = True
        if self._can_replay and self._expected is None and not self._unusable:
            self._ask("history", now)
        return self._take()

    def on_disconnected(self, now: float) -> list[Action[Body]]:
        self._connected = False
        return self.new_epoch("connection lost", now)

    def new_epoch(self, reason: str, now: float) -> list[Action[Body]]:
        """The source may be in another life: what it said before is forgotten."""
        self._begin_epoch(reason, now)
        if self._can_replay and self._connected:
            self._ask("history", now)
        return self._take()

    def unusable(self, reason: str) -> list[Action[Body]]:
        """Its events cannot be followed, until a new epoch."""
        self._reset()
        self._unusable = reason
        self._out.append(Forget(reason))
        return self._take()

    def settled(self) -> None:
        """The source holds nothing any more and said so: older history is of no matter."""
        self._doubts.pop("history", None)

    # ---- batches ----

    def live(self, batch: Numbered[Body], now: float) -> list[Action[Body]]:
        """A batch as it was published."""
        self._connected = True
        self._heard = now
        if self._unusable:
            self._ignore("learned")
            return self._take()
        self._unconfirmed = True
        seq = batch.seq
        if self._expected is not None and seq < self._expected:
            if self._recent.get(seq) == batch.digest or self._first - 8 <= seq < self._first:
                self._ignore("duplicate")
                return self._take()
            self._begin_epoch(f"numbers begin again at {seq}", now)
        if self._expected is None:
            self._first_contact(batch, now)
        elif seq == self._expected:
            self._apply(batch)
            self._drain()
        else:
            self._gap(batch, now)
        return self._take()

    def replayed(self, batch: Numbered[Body], now: float) -> list[Action[Body]]:
        """A batch that answers ``Resync``."""
        replay, seq = self._replay, batch.seq
        if replay is None:
            self._ignore("late replay")
            return self._take()
        replay.heard = now
        replay.answers += 1
        if replay.answers == 1:
            self._first_answer(replay, seq)
        expected = self._expected or 0
        if seq < expected:
            if self._recent.get(seq, batch.digest) == batch.digest:
                self._ignore("applied already")
            else:
                self._begin_epoch(f"batch {seq} is another one than before", now)
                self._ask("history", now)
        elif seq == expected:
            self._apply(batch)
            replay.applied += 1
            self._drain()
        else:
            self._hold(batch)
        return self._take()

    def replay_ended(self, now: float) -> list[Action[Body]]:
        """The source has no more to replay."""
        replay, self._replay = self._replay, None
        if replay is None:
            return self._take()
        self._cooldown = self._limits.cooldown_s
        self._replay_at = now + self._cooldown
        if replay.why == "rebuild" and not replay.answers:
            self._forget("nothing to rebuild from")
        if self._expected is None:
            self._start_at(0, "")
        self._drain()
        self._attempts = 0 if replay.applied or not len(self._pending) else self._attempts + 1
        if self._attempts >= self._limits.attempts:
            self._give_up(f"batch {self._expected} is lost", now)
        elif len(self._pending):
            self._ask("gap", now)
        return self._take()

    # ---- time and outcomes ----

    def tick(self, now: float) -> list[Action[Body]]:
        """To be called a few times a second."""
        limits, replay, heard = self._limits, self._replay, self._heard
        if replay is not None and (
            now - replay.heard > limits.replay_idle_s or now - replay.started > limits.replay_total_s
        ):
            self._fail_replay(now)
        if self._gap_since is not None and now - self._gap_since > limits.reorder_s:
            self._give_up(f"batch {self._expected} is lost", now)
        if self._unconfirmed and self._can_replay and heard is not None and now - heard > limits.quiet_s:
            self._unconfirmed = False
            self._ask("probe", now)
        if self._wanted and self._connected:
            self._ask(self._wanted, now)
        return self._take()

    def outcome(self, agreed: bool, now: float) -> list[Action[Body]]:
        """How a prediction compared with the truth, where nothing else explains a difference."""
        if self.trust in ("learned", "syncing"):
            return self._take()
        self._outcomes.add(agreed)
        if self._outcomes.confident:
            self._doubts.pop("history", None)
            self._doubts.pop("predictions", None)
        elif not self._doubts and self._outcomes.complaint:
            self._doubts["predictions"] = self._outcomes.complaint
            self._outcomes.clear()
            if self._can_replay and now >= self._rebuild_at:
                self._rebuild_at = now + self._limits.rebuild_cooldown_s
                self._ask("rebuild", now)
        return self._take()

    # ---- inside ----

    def _begin_epoch(self, reason: str, now: float) -> None:
        self.epochs += 1
        self._reset()
        self._unusable = ""
        self._heard = now
        self._out.append(Forget(reason))

    def _forget(self, reason: str) -> None:
        """Within an epoch: begin anew from what is replayed or pending."""
        self._expected = None
        self._recent.clear()
        self._gap_since = None
        self._doubts.pop("history", None)
        self._doubts.pop("gap", None)
        self._out.append(Forget(reason))

    def _first_contact(self, batch: Numbered[Body], now: float) -> None:
        fruitless = self._replay is None and self._wanted == "history" and now < self._replay_at
        if batch.seq == 0 or not self._can_replay or fruitless:
            missing = "no answer to a replay" if fruitless else "there is no replay"
            self._start_at(batch.seq, f"joined at batch {batch.seq}, and {missing}")
            self._wanted = "rebuild" if fruitless and batch.seq else ""
            if self._replay is not None:
                self._replay.why = "probe"  # Nothing came before: no history to wait for.
            self._apply(batch)
            self._drain()
        else:
            self._hold(batch)
            self._ask("history", now)

    def _first_answer(self, replay: _Replay, seq: int) -> None:
        if replay.why == "rebuild":
            self._forget("rebuilding")
        if self._expected is None:
            self._start_at(seq, f"history begins at batch {seq}")
        elif seq > self._expected:
            lost = f"batches {self._expected} to {seq - 1} are lost"
            self._forget(lost)
            self._start_at(seq, lost)

    def _gap(self, batch: Numbered[Body], now: float) -> None:
        self._hold(batch)
        self._open_gap(now)
        if not self._can_replay and len(self._pending) >= self._limits.reorder_batches:
            self._give_up(f"batch {self._expected} is lost", now)

    def _open_gap(self, now: float) -> None:
        if "gap" not in self._doubts and not self._syncing:
            self.gaps += 1
            self._doubts["gap"] = f"waiting for batch {self._expected}"
        if self._can_replay:
            self._ask("gap", now)
        elif self._gap_since is None:
            self._gap_since = now

    def _ask(self, why: str, now: float) -> None:
        """Resync for this reason: now, or when the cool-down is over."""
        if self._replay is not None and why != "rebuild":
            return
        if _URGENCY.index(why) > _URGENCY.index(self._wanted):
            self._wanted = why
        if self._replay is not None or now < self._replay_at:
            return
        why, self._wanted = self._wanted, ""
        if why == "rebuild" and self._expected is None:
            why = "history"
        self._replay = _Replay(why=why, started=now, heard=now)
        self.replays += 1
        self._out.append(Resync(0 if why == "rebuild" else self._expected or 0))

    def _fail_replay(self, now: float) -> None:
        replay, self._replay = self._replay, None
        if replay is None:
            return
        self._cooldown = min(2 * max(self._cooldown, 0.5), self._limits.cooldown_most_s)
        self._replay_at = now + self._cooldown
        first = self._pending.first
        if replay.applied:
            self._wanted = "gap" if replay.why == "probe" else replay.why
            self._wanted = "history" if self._wanted == "rebuild" else self._wanted
        elif self._expected is None and first is None:
            self._wanted = "history"
        elif self._expected is None:
            self._start_at(first or 0, "no answer to a replay")
            self._drain()
            self._wanted = "rebuild"
        elif first is not None:
            self._give_up("no answer to a replay", now)
            self._wanted = "rebuild"
        elif replay.why != "probe":
            self._wanted = replay.why

    def _start_at(self, seq: int, doubt: str) -> None:
        self._expected = self._first = seq
        self._pending.drop_before(seq)
        if seq > 0:
            self._doubts["history"] = doubt

    def _give_up(self, reason: str, now: float) -> None:
        """The hole cannot be filled: forget, and go on from what came after it."""
        start = self._pending.first if self._can_replay else self._pending.last_run
        self._forget(reason)
        self._attempts = 0
        if start is not None:
            self._start_at(start, reason)
        self._drain()
        if len(self._pending):
            self._open_gap(now)

    def _hold(self, batch: Numbered[Body]) -> None:
        # One that finds no place is as good as lost on the way: what comes later shows the hole.
        refused = self._pending.add(batch)
        if refused:
            self._ignore(refused)

    def _apply(self, batch: Numbered[Body]) -> None:
        self._recent[batch.seq] = batch.digest
        if len(self._recent) > self._limits.recent:
            self._recent.popitem(last=False)
        self._expected = batch.seq + 1
        self._pending.pop(batch.seq)
        self._out.append(Apply(batch.body))

    def _drain(self) -> None:
        while self._expected is not None and (batch := self._pending.pop(self._expected)) is not None:
            self._apply(batch)
        if not len(self._pending):
            self._gap_since = None
            self._doubts.pop("gap", None)

    def _ignore(self, why: str) -> None:
        self._out.append(Ignore(why))

    def _take(self) -> list[Action[Body]]:
        out, self._out = self._out, []
        return out
