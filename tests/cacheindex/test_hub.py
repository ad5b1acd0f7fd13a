"""The hub against real ZMQ publishers: gaps, restarts, garbage, floods, stalls, both directions."""

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from index_fakes import (
    CLEARED,
    MODEL,
    SECRET,
    Publisher,
    endpoint,
    eventually,
    frames,
    keys_of,
    payload,
    removed,
    stored,
)

from cacheindex.hub import Hub, SourceSpec, SourceStatus
from cacheindex.table import Table, by_holder

TOKENS = list(range(500, 500 + 16 * 400))
KEYS = keys_of(TOKENS)

Watch = Callable[..., "Line"]


def block(index: int, **more: Any) -> list[dict[str, Any]]:
    """Block number ``index`` of the prompt, hashed by its number."""
    parent = index - 1 if index else None
    return [stored([index], parent, TOKENS[16 * index : 16 * index + 16], 16, **more)]


class Line:
    """One worker: its publisher in the present life, and what the hub makes of it."""

    def __init__(self, context: "zmq.Context[Any]", hub: Hub, folder: Path, worker: str, **how: Any) -> None:
        self.context, self.hub, self.worker = context, hub, worker
        self.replays = how.pop("replays", True)
        self.bind = how.pop("bind", False)
        self.endpoint = how.pop("endpoint", None) or endpoint(folder, worker)
        self.replay_endpoint = endpoint(folder, f"{worker}r") if self.replays else None
        self.how = how
        self.publisher: Publisher | None = None
        self.spec = SourceSpec(worker, MODEL, self.endpoint, self.replay_endpoint, self.bind)

    def boot(self, **how: Any) -> Publisher:
        self.publisher = Publisher(
            self.context,
            self.endpoint,
            self.replay_endpoint,
            connect=self.bind,
            **{**self.how, **how},
        )
        return self.publisher

    @property
    def said(self) -> Publisher:
        assert self.publisher is not None
        return self.publisher

    def kill(self) -> None:
        self.said.close()
        self.publisher = None

    @property
    def status(self) -> SourceStatus:
        status = self.hub.status(self.worker)
        assert status is not None
        return status

    @property
    def reach(self) -> int:
        return by_holder(self.hub.table.match(KEYS)).get(self.worker, {}).get("gpu", 0)

    def reaches(self, tokens: int, deadline: float = 8.0) -> None:
        eventually(lambda: self.reach == tokens, f"{self.worker} reaches {tokens} tokens", deadline)

    def counts(self, **figures: object) -> None:
        """The status, published at the end of a turn, comes to say this."""
        eventually(
            lambda: all(getattr(self.status, name) == value for name, value in figures.items()),
            f"{self.worker} says {figures}, it says {self.status}",
        )

    def trusted(self, trust: str) -> None:
        eventually(lambda: self.status.trust == trust, f"{self.worker} is {trust}")


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not below tmp_path: ipc addresses have about a hundred characters.
    path = Path(tempfile.mkdtemp(prefix="hp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(Table(1 << 24), secret=SECRET, max_queue=2000)
    hub.start()
    yield hub
    hub.close()
    assert hub.snapshot().errors == 0
    hub.table.check_integrity()
    assert not [thread for thread in threading.enumerate() if thread.name == "cacheindex-hub"]


@pytest.fixture
def watch(hub: Hub, folder: Path) -> Iterator[Watch]:
    context: zmq.Context[Any] = zmq.Context()
    lines: list[Line] = []

    def make(worker: str = "w", *, subscribed: bool = True, **how: Any) -> Line:
        line = Line(context, hub, folder, worker, **how)
        lines.append(line)
        line.boot()
        hub.watch(line.spec)
        if subscribed:
            line.said.wait_subscribed()
        return line

    yield make
    for line in lines:
        if line.publisher is not None:
            line.kill()
    context.destroy(linger=0)


@pytest.mark.parametrize("form", ["map", "array"])
def test_events_arrive(watch: Watch, form: str) -> None:
    line = watch(form=form)
    line.said.say(block(0) + block(1))
    line.said.say(block(2))
    line.reaches(48)
    line.trusted("exact")
    line.said.say([removed([2])])
    line.reaches(32)
    line.said.say([CLEARED])
    line.reaches(0)
    line.counts(block_size=16, stride=16, last_seq=3, batches=4, connected=True)
    status = line.status
    assert status.lag_s is not None
    assert status.lag_s < 5


def test_history_before_our_time_is_fetched(watch: Watch, hub: Hub, folder: Path) -> None:
    line = watch(subscribed=False)
    hub.unwatch("w")
    line.kill()
    publisher = line.boot()
    for index in range(5):
        publisher.say(block(index), lost=True)
    hub.watch(line.spec)
    line.reaches(80)
    line.trusted("exact")


def test_joining_late_without_replay_is_suspect(watch: Watch) -> None:
    line = watch(replays=False, first_seq=7)
    line.said.say(block(0))
    line.reaches(16)
    line.trusted("suspect")


def test_a_gap_is_healed_by_replay(watch: Watch) -> None:
    line = watch()
    line.trusted("exact")  # It has been asked for history, and had none.
    line.said.say(block(0))
    line.reaches(16)
    line.said.say(block(1), lost=True)
    line.said.say(block(2))
    line.reaches(48)
    line.trusted("exact")
    line.counts(gaps=1)
    assert line.said.asked[-1] == 1


def test_a_loss_at_the_end_is_found_by_asking(watch: Watch) -> None:
    line = watch()
    line.said.say(block(0))
    line.reaches(16)
    line.said.say(block(1), lost=True)
    line.reaches(32)


@pytest.mark.parametrize(("replays", "before"), [(True, 0), (True, 2), (True, 3), (True, 5), (False, 0)])
def test_a_restart_is_noticed_whatever_its_numbers(watch: Watch, replays: bool, before: int) -> None:
    """The new life is at a lower number, the same, or one further when it is heard again."""
    line = watch(replays=replays)
    for index in range(3):
        line.said.say(block(index))
    line.reaches(48)
    killed = time.monotonic()
    line.kill()
    line.reaches(0, deadline=1.0)
    assert time.monotonic() - killed < 1.0
    publisher = line.boot()
    for index in range(before):
        publisher.say(block(index), lost=True)
    publisher.wait_subscribed()
    publisher.say(block(before))
    line.reaches(16 * (before + 1))
    line.trusted("exact")
    eventually(lambda: line.status.epochs >= 2, "another epoch is counted")


def test_a_report_from_outside_begins_anew(watch: Watch, hub: Hub) -> None:
    line = watch()
    line.said.say(block(0) + block(1))
    line.reaches(32)
    epochs = line.status.epochs
    hub.new_epoch("w", "start time changed")
    eventually(lambda: line.status.epochs == epochs + 1, "a new epoch")
    line.reaches(32)
    line.trusted("exact")


def test_garbage_is_counted_and_ignored(watch: Watch) -> None:
    line = watch()
    line.said.say(block(0))
    line.reaches(16)
    for garbage in (
        [b"alone"],
        [b"t", b"short", b"x"],
        frames(77, b"\xc1\xc1"),
        frames(1, b""),
        [b"t"] * 40,
        frames(2**64 - 1, payload(block(1))),
    ):
        line.said.raw(garbage)
    line.said.say([{"type": "Unheard"}, *block(1)])
    line.reaches(32)
    line.counts(bad_frames=6, trust="exact")
    eventually(lambda: line.status.skipped.get("unknown_event") == 1, "the unknown event is counted")


def test_a_flood_does_not_starve_another_source(watch: Watch) -> None:
    loud, calm = watch("loud"), watch("calm")
    data = payload([stored(list(range(64)), None, TOKENS[: 64 * 16], 16)])
    stop = threading.Event()

    def flood() -> None:
        seq = 0
        while not stop.is_set():
            loud.said.raw(frames(seq, data))
            seq += 1

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        worst = 0.0
        for index in range(15):
            begun = time.monotonic()
            calm.said.say(block(index))
            calm.reaches(16 * (index + 1))
            worst = max(worst, time.monotonic() - begun)
    finally:
        stop.set()
        flooder.join()
    # On a machine shared with others: far below the seconds a queue served in order would take.
    assert worst < 2.0
    assert loud.status.batches > 0


def test_what_does_not_fit_on_our_side_is_fetched(hub: Hub, watch: Watch) -> None:
    """The engine's sends never wait for us, and nothing is missing in the end."""
    line = watch()
    burst, begun = 6000, time.monotonic()
    for index in range(burst):
        line.said.say(block(index % 300))
    assert time.monotonic() - begun < 10
    eventually(lambda: line.status.last_seq == burst - 1, "all batches are applied", 20)
    line.reaches(16 * 300)
    line.trusted("exact")


def test_a_replay_that_never_answers_holds_nobody_up(hub: Hub, watch: Watch, folder: Path) -> None:
    deaf, calm = watch("deaf", replays=False, first_seq=4), watch("calm")
    hub.watch(SourceSpec("deaf", MODEL, deaf.endpoint, endpoint(folder, "nobody")))
    deaf.said.wait_subscribed()
    deaf.said.say(block(0))
    for index in range(10):
        calm.said.say(block(index))
        calm.reaches(16 * (index + 1), deadline=2.0)
    deaf.reaches(16)
    deaf.counts(trust="suspect", reason="no answer to a replay")


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_bind_mode(hub: Hub, watch: Watch, folder: Path, scheme: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    line = watch(bind=True, endpoint=free if scheme == "tcp" else None)
    line.said.say(block(0) + block(1))
    line.reaches(32)
    line.trusted("exact")
    line.kill()
    line.reaches(0, deadline=1.0)
    line.boot().wait_subscribed()
    line.said.say(block(0))
    line.reaches(16)
    line.trusted("exact")


def test_two_binds_of_one_address(hub: Hub, watch: Watch) -> None:
    line = watch("first", bind=True, replays=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        hub.watch(SourceSpec("w", MODEL, f"tcp://127.0.0.1:{taken.getsockname()[1]}", None, True))
        eventually(lambda: "cannot bind" in (hub.status("w") or line.status).reason, "it says why not")
    line.said.say(block(0))
    line.reaches(16)


def test_topics(hub: Hub, watch: Watch) -> None:
    line = watch()
    hub.watch(SourceSpec("w", MODEL, line.endpoint, None, topic_prefix="kv@mine"))
    line.said.wait_subscribed()
    line.said.raw(frames(0, payload(block(0)), b"kv@other"))
    line.said.raw(frames(0, payload(block(0) + block(1)), b"kv@mine@model"))
    line.reaches(32)
    line.counts(batches=1)


def test_unwatch_forgets(hub: Hub, watch: Watch) -> None:
    one, two = watch("one"), watch("two")
    for line in (one, two):
        line.said.say(block(0))
        line.reaches(16)
    hub.unwatch("one")
    eventually(lambda: hub.status("one") is None and one.reach == 0, "one is forgotten")
    assert two.reach == 16
    hub.unwatch("nobody")
    hub.watch(two.spec)
    two.said.say(block(1))
    two.reaches(32)
    assert list(hub.snapshot().sources) == ["two"]


def test_predictions_demote_and_promote(hub: Hub, watch: Watch) -> None:
    line = watch()
    line.said.say(block(0))
    line.trusted("exact")
    for _ in range(3):
        hub.report("w", agreed=False)
    line.trusted("suspect")
    eventually(lambda: line.said.asked[-1] == 0 and line.reach == 16, "it is rebuilt")
    for _ in range(8):
        hub.report("w", agreed=True)
    line.trusted("exact")


def test_a_hybrid_model_is_learned(watch: Watch) -> None:
    line = watch()
    line.said.say(block(0))
    line.reaches(16)
    line.said.say(block(0, group_idx=1, kv_cache_spec_kind="sliding_window"))
    line.trusted("learned")
    line.reaches(0)
    eventually(lambda: "sliding_window" in line.status.reason, "it says why")
    line.said.say(block(1))
    line.kill()
    line.boot().wait_subscribed()
    line.said.say(block(0))
    line.reaches(16)
