"""What to believe of one cache node: numbers and lives of its batches in, decisions out. No I/O, no clock.

A node says which life each batch is of, numbers its batches from 0 without holes, speaks at least
every ``heartbeat_s``, and tells everything it holds when asked. So whatever goes wrong ends the same
way: what it said is forgotten and told anew. Until it is told, later batches wait.

What a caller may rely on, as of ``feed.Feed``: since the last ``Forget``, what was told at once and then
every batch after it, once each, in the order of their numbers, without a hole.
"""

from collections import deque
from typing import Generic

import msgspec

from cacheindex.actions import Apply, Forget, Ignore, Limits, Resync
from cacheindex.pending import Body, Numbered, Pending
from cacheindex.trust import Trust

MISSED_HEARTBEATS = 3


class Refill(msgspec.Struct, frozen=True):
    """Ask the node for all it holds. Answers go to ``answered``, as those to ``Resync`` do."""


NodeAction = Apply[Body] | Ignore | Resync | Forget | Refill


class _Question(msgspec.Struct):
    """``refill`` or else a replay. ``upto``: the number up to which the answers to a refill are true."""

    refill: bool
    started: float
    heard: float
    answers: int = 0
    upto: int | None = None


class NodeFeed(Generic[Body]):
    """Counters for metrics: ``epochs`` begun, ``gaps`` seen, ``replays`` and ``refills`` asked for."""

    def __init__(self, *, heartbeat_s: float = 1.0, limits: Limits | None = None) -> None:
        self.epochs = self.gaps = self.replays = self.refills = 0
        self.epoch: str | None = None
        self._heartbeat_s = heartbeat_s
        self._limits = limits or Limits()
        self._connected = False
        self._past: deque[str] = deque(maxlen=16)
        self._expected: int | None = None
        self._pending: Pending[Body] = self._nothing()
        self._question: _Question | None = None
        self._wanted = ""
        self._ask_at = float("-inf")
        self._cooldown = self._limits.cooldown_s
        self._heard: float | None = None
        self._silent = False
        self._out: list[NodeAction[Body]] = []

    def _nothing(self) -> Pending[Body]:
        return Pending(self._limits.pending_batches, self._limits.pending_bytes)

    # ---- what is known ----

    @property
    def trust(self) -> Trust:
        if self._silent:
            return "suspect"
        if self._expected is None:
            return "syncing"
        return "suspect" if self._missing else "exact"

    @property
    def reason(self) -> str:
        """Why ``trust`` is not exact, for people; "" where it is."""
        if not self._connected:
            return "not connected"
        if self._silent:
            return "no heartbeat"
        if self._expected is None:
            return "fetching what it holds"
        return f"waiting for batch {self._expected}" if self._missing else ""

    @property
    def last_seq(self) -> int | None:
        """The number of the batch applied last."""
        return self._expected - 1 if self._expected else None

    @property
    def asking(self) -> bool:
        """Whether answers to the last question are still wanted."""
        return self._question is not None

    @property
    def _missing(self) -> bool:
        return len(self._pending) > 0 or self._wanted != "" or self._question is not None

    # ---- connections and lives ----

    def on_connected(self, now: float) -> list[NodeAction[Body]]:
        self._connected, self._heard = True, now
        if self._expected is None:
            self._ask("refill", now)
        return self._take()

    def on_disconnected(self, now: float) -> list[NodeAction[Body]]:
        self._connected, self._silent, self._heard = False, False, None
        self._forget("connection lost")
        return self._take()

    def new_epoch(self, reason: str, now: float) -> list[NodeAction[Body]]:
        """What the node said is in doubt: it is forgotten, and asked for again."""
        self._forget(reason)
        if self._connected:
            self._ask("refill", now)
        return self._take()

    # ---- batches ----

    def live(self, batch: Numbered[Body], epoch: str, now: float) -> list[NodeAction[Body]]:
        """A batch as it was published."""
        self._connected, self._heard, self._silent = True, now, False
        if not self._same_life(epoch, now):
            return self._take()
        if self._expected is None:
            self._hold(batch)
            self._ask("refill", now)
        elif batch.seq < self._expected:
            self._ignore("duplicate")
        elif batch.seq == self._expected:
            self._apply(batch)
            self._drain()
        else:
            self._hold(batch)
            self._gap(now)
        return self._take()

    def said(self, last_seq: int, now: float) -> list[NodeAction[Body]]:
        """The node says in passing what its last number is."""
        if self._expected is not None and last_seq >= self._expected:
            self._gap(now)
        return self._take()

    def answered(self, batch: Numbered[Body], epoch: str, now: float) -> list[NodeAction[Body]]:
        """An answer to the last question."""
        question = self._question
        if question is None:
            self._ignore("late answer")
        elif self._same_life(epoch, now, answer=True) and self._question is question:
            question.heard = now
            question.answers += 1
            if question.refill:
                self._refilled(question, batch, now)
            else:
                self._replayed(question, batch, now)
        return self._take()

    def answers_ended(self, now: float) -> list[NodeAction[Body]]:
        """The node has no more to answer."""
        question, self._question = self._question, None
        if question is None:
            return self._take()
        if question.refill and question.upto is None:
            self._failed(now)
            return self._take()
        if question.upto is not None:
            self._expected = question.upto + 1
            self._pending.drop_before(self._expected)
        self._drain()
        self._cooldown = self._limits.cooldown_s
        self._ask_at = now + self._cooldown
        if not question.refill and (len(self._pending) or not question.answers):
            self._ask("refill", now)  # The node has not kept what we miss.
        elif len(self._pending):
            self._gap(now)
        return self._take()

    # ---- time ----

    def tick(self, now: float) -> list[NodeAction[Body]]:
        """To be called a few times a second."""
        limits, question = self._limits, self._question
        if question is not None and (
            now - question.heard > limits.replay_idle_s or now - question.started > limits.replay_total_s
        ):
            self._question = None
            if question.upto is not None:
                self._forget("half told")
            self._failed(now)
        if self._heard is not None and now - self._heard > MISSED_HEARTBEATS * self._heartbeat_s:
            self._silent = True
        if self._wanted and self._connected:
            self._ask(self._wanted, now)
        return self._take()

    # ---- inside ----

    def _same_life(self, epoch: str, now: float, *, answer: bool = False) -> bool:
        """Whether this is of the present life, begun now where it is a new one. Only the living answer;
        what was published may be a late word of the dead."""
        if epoch == self.epoch:
            return True
        if epoch in self._past:
            if not answer:
                self._ignore("past epoch")
                return False
            self._past.remove(epoch)
        self.epochs += 1
        if self.epoch is not None:
            self._past.append(self.epoch)
        first, self.epoch = self.epoch is None, epoch
        if not first:
            self._forget("a new epoch")
            self._ask_at = now
            self._ask("refill", now)
        return True

    def _forget(self, reason: str) -> None:
        self._expected = None
        self._pending = self._nothing()
        self._question = None
        self._wanted = ""
        self._out.append(Forget(reason))

    def _gap(self, now: float) -> None:
        if not self._wanted and self._question is None:
            self.gaps += 1
            self._ask("replay", now)

    def _refilled(self, question: _Question, batch: Numbered[Body], now: float) -> None:
        if question.upto is None:
            question.upto = batch.seq
            self._expected = None
            self._out.append(Forget("told anew"))
        if batch.seq == question.upto:
            self._out.append(Apply(batch.body))
        else:
            self._forget("told of two moments")
            self._failed(now)

    def _replayed(self, question: _Question, batch: Numbered[Body], now: float) -> None:
        expected = self._expected or 0
        if batch.seq < expected:
            self._ignore("applied already")
        elif batch.seq == expected:
            self._apply(batch)
            self._drain()
        elif question.answers == 1:
            self._question = None  # The node has not kept what we miss.
            self._ask("refill", now)
        else:
            self._hold(batch)

    def _ask(self, why: str, now: float) -> None:
        """Now, or when the cool-down is over."""
        if self._question is not None:
            return
        if self._wanted != "refill":
            self._wanted = why
        if now < self._ask_at:
            return
        why, self._wanted = self._wanted, ""
        self._question = _Question(why == "refill" or self._expected is None, now, now)
        if self._question.refill:
            self.refills += 1
            self._out.append(Refill())
        else:
            self.replays += 1
            self._out.append(Resync(self._expected or 0))

    def _failed(self, now: float) -> None:
        """A question found no answer that could be used."""
        self._cooldown = min(2 * max(self._cooldown, 0.5), self._limits.cooldown_most_s)
        self._ask_at = now + self._cooldown
        self._wanted = "refill"

    def _hold(self, batch: Numbered[Body]) -> None:
        # One that finds no place is as good as lost on the way: what comes later shows the hole.
        refused = self._pending.add(batch)
        if refused:
            self._ignore(refused)

    def _apply(self, batch: Numbered[Body]) -> None:
        self._expected = batch.seq + 1
        self._pending.pop(batch.seq)
        self._out.append(Apply(batch.body))

    def _drain(self) -> None:
        while self._expected is not None and (batch := self._pending.pop(self._expected)) is not None:
            self._apply(batch)

    def _ignore(self, why: str) -> None:
        self._out.append(Ignore(why))

    def _take(self) -> list[NodeAction[Body]]:
        out, self._out = self._out, []
        return out
