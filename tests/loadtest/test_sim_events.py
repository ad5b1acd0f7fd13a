"""The simulated engine's event stream: wire form, replay, and each of its faults."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from loadtest.harness import EventTap, eventually, fleet, replay, socket_folder
from loadtest.sim.cache import CacheEvent, Cleared, Removed, Space, Stored
from loadtest.sim.clock import HandClock
from loadtest.sim.config import SimConfig
from loadtest.sim.wire import Encoding, EventEncoder, HashForm
from loadtest.simengine import SimEngine

STORED_FIELDS = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)
REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx")


@asynccontextmanager
async def listening(
    config: SimConfig | None = None, clock: HandClock | None = None
) -> AsyncIterator[tuple[SimEngine, EventTap]]:
    async with fleet(1, config=config, clock=clock) as (engine,), EventTap(engine.events_endpoint) as tap:
        await eventually(lambda: engine.subscribers == 1)
        yield engine, tap
        assert engine.errors == 0


async def ask(engine: SimEngine, *prompts: str, **fields: object) -> None:
    async with httpx.AsyncClient(base_url=engine.url) as client:
        for prompt in prompts:
            body = {"model": "sim", "prompt": prompt, "max_tokens": 1, **fields}
            assert (await client.post("/v1/completions", json=body)).status_code == 200


def as_maps(events: Sequence[Any], encoding: Encoding) -> list[dict[str, Any]]:
    """Events of either encoding as maps."""
    if encoding == "map":
        return list(events)
    names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}
    return [dict(zip(names.get(event[0], ["type"]), event, strict=False)) for event in events]


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("form", ["int", "bytes", "str"])
def test_both_encodings_say_the_same_with_each_form_of_hash(encoding: Encoding, form: HashForm) -> None:
    first, second = b"\1" * 32, b"\2" * 32
    encoder = EventEncoder(2, encoding, form, {"lora": 5}, dp_rank=3)
    events: list[CacheEvent] = [
        Stored([first, second], None, [1, 2, 3, 4], Space("lora", "salt"), 0),
        Stored([second], first, [3, 4], Space("", "salt"), 1),
        Removed(first),
        Cleared(),
    ]
    time, written, rank = msgspec.msgpack.decode(encoder.payload(1.5, events))
    assert (time, rank) == (1.5, 3)
    stored, plain, removed, cleared = as_maps(written, encoding)
    kinds = {"int": int, "bytes": bytes, "str": str}
    assert all(isinstance(digest, kinds[form]) for digest in stored["block_hashes"])
    assert stored["block_hashes"] == [encoder.hash(first), encoder.hash(second)]
    assert stored["parent_block_hash"] is None
    assert stored["token_ids"] == [1, 2, 3, 4]
    assert (stored["block_size"], stored["lora_id"], stored["lora_name"]) == (2, 5, "lora")
    assert stored["extra_keys"] == [["lora", "salt"], ["lora"]]
    assert (plain["parent_block_hash"], plain["lora_id"], plain["extra_keys"]) == (
        encoder.hash(first),
        None,
        [None],
    )
    assert removed == {
        "type": "BlockRemoved",
        "block_hashes": [encoder.hash(first)],
        "medium": "GPU",
        "group_idx": 0,
    }
    assert cleared == {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("block_size", [1, 16, 32])
async def test_events_replayed_by_a_listener_give_the_engines_truth(block_size: int) -> None:
    config = SimConfig(block_size=block_size, num_blocks=1 + 640 // block_size, topic="kv@r1@sim")
    async with listening(config) as (engine, tap):
        for i in range(20):
            await ask(engine, f"{i % 7} " * 60, max_tokens=40)
        await eventually(lambda: len(tap.batches) == engine.next_seq)
        assert {batch.topic for batch in tap.batches} == {b"kv@r1@sim"}
        assert tap.seqs == list(range(engine.next_seq))
        assert any(event["type"] == "BlockRemoved" for event in tap.events)
        assert prefixes(tap.events) == engine.app.cache.held()[Space()]


def prefixes(events: Sequence[dict[str, Any]]) -> set[tuple[int, ...]]:
    """What a listener that counts copies believes to be held."""
    copies: dict[int, int] = {}
    known: dict[int | None, tuple[int, ...]] = {None: ()}
    for event in events:
        if event["type"] == "BlockStored":
            parent, size = known[event["parent_block_hash"]], event["block_size"]
            for i, digest in enumerate(event["block_hashes"]):
                parent = parent + tuple(event["token_ids"][i * size : (i + 1) * size])
                known[digest] = parent
                copies[digest] = copies.get(digest, 0) + 1
        elif event["type"] == "BlockRemoved":
            for digest in event["block_hashes"]:
                copies[digest] -= 1
        else:
            copies.clear()
    return {known[digest] for digest, count in copies.items() if count > 0}


async def test_replay_gives_what_is_still_buffered_and_an_end() -> None:
    config = SimConfig(buffer_steps=3)
    async with listening(config) as (engine, tap):
        for i in range(5):
            await ask(engine, f"{i}" * 20)
        await eventually(lambda: len(tap.batches) == 5)
        assert await replay(engine.replay_endpoint, 0) == tap.batches[2:]
        assert await replay(engine.replay_endpoint, 4) == tap.batches[4:]
        assert await replay(engine.replay_endpoint, 99) == []
        assert engine.replays == 3


async def test_a_plain_tcp_endpoint_connects_and_the_listener_binds() -> None:
    async with (
        EventTap("tcp://127.0.0.1:*", bind=True) as tap,
        SimEngine(SimConfig(events_endpoint=tap.endpoint)) as engine,
    ):
        await eventually(lambda: engine.subscribers == 1)
        await ask(engine, "x" * 20)
        await eventually(lambda: tap.seqs == [0])


async def test_a_wildcard_endpoint_binds_on_loopback() -> None:
    async with SimEngine(SimConfig(events_endpoint="tcp://*:*", replay_endpoint="tcp://*:*")) as engine:
        assert engine.events_endpoint.startswith("tcp://127.0.0.1:")
        async with EventTap(engine.events_endpoint) as tap:
            await eventually(lambda: engine.subscribers == 1)
            await ask(engine, "x" * 20)
            await eventually(lambda: tap.seqs == [0])
        assert len(await replay(engine.replay_endpoint, 0)) == 1


async def test_reset_is_announced() -> None:
    async with listening(SimConfig(dev_mode=True)) as (engine, tap):
        await ask(engine, "x" * 20)
        async with httpx.AsyncClient() as client:
            await client.post(f"{engine.url}/reset_prefix_cache")
        await eventually(lambda: len(tap.batches) == 2)
        assert tap.events[-1] == {"type": "AllBlocksCleared"}


# -- faults of the stream -----------------------------------------------------------------------


async def publish(engine: SimEngine, count: int, start: int = 0) -> None:
    """``count`` batches, one each."""
    await ask(engine, *(f"{start + i:04d}" * 5 for i in range(count)))


async def test_dropped_batches_leave_gaps_that_a_replay_fills() -> None:
    async with listening() as (engine, tap):
        engine.set_faults(drop_events=0.5, seed=7)
        await publish(engine, 20)
        engine.clear_faults()
        await publish(engine, 1, start=20)
        await eventually(lambda: 20 in tap.seqs)
        assert 0 < len(set(range(20)) - set(tap.seqs)) < 20
        assert tap.seqs == sorted(tap.seqs)
        assert [batch.seq for batch in await replay(engine.replay_endpoint, 0)] == list(range(21))


async def test_faults_strike_the_same_batches_with_the_same_seed() -> None:
    seen = []
    for _ in range(2):
        async with listening() as (engine, tap):
            engine.set_faults(drop_events=0.3, duplicate_events=0.3, reorder_events=0.3, seed=11)
            await publish(engine, 30)
            engine.clear_faults()
            await publish(engine, 1, start=30)
            await eventually(lambda tap=tap: 30 in tap.seqs)  # type: ignore[misc]
            seen.append(tap.seqs)
    assert seen[0] == seen[1]
    assert seen[0] != sorted(set(seen[0]))


async def test_duplicated_batches_come_twice() -> None:
    async with listening() as (engine, tap):
        engine.set_faults(duplicate_events=1.0)
        await publish(engine, 3)
        await eventually(lambda: len(tap.batches) == 6)
        assert tap.seqs == [0, 0, 1, 1, 2, 2]


async def test_reordered_batches_change_places() -> None:
    async with listening() as (engine, tap):
        engine.set_faults(reorder_events=1.0)
        await publish(engine, 5)
        engine.clear_faults()
        await eventually(lambda: len(tap.batches) == 5)
        assert tap.seqs == [1, 0, 3, 2, 4]


async def test_delayed_batches_wait_for_the_clock() -> None:
    clock = HandClock()
    async with listening(clock=clock) as (engine, tap):
        engine.set_faults(delay_events=2.0)
        await publish(engine, 2)
        await eventually(lambda: clock.sleepers == 1)
        await clock.advance(1.9)
        assert engine.next_seq == 2
        assert tap.batches == []
        await clock.advance(0.1)
        await eventually(lambda: tap.seqs == [0, 1])


async def test_a_stalled_stream_goes_on_in_order() -> None:
    async with listening() as (engine, tap):
        engine.set_faults(stall_events=True)
        await publish(engine, 3)
        assert tap.batches == []
        assert len(await replay(engine.replay_endpoint, 0)) == 3
        engine.clear_faults()
        await eventually(lambda: tap.seqs == [0, 1, 2])


async def test_garbage_comes_between_good_batches() -> None:
    async with listening() as (engine, tap):
        engine.set_faults(garbage_events=3)
        await publish(engine, 4)
        await eventually(lambda: len(tap.batches) == 7)
        assert [batch.events is None for batch in tap.batches] == [True, False] * 3 + [False]
        assert tap.seqs == [0, 1, 2, 3]


@pytest.mark.parametrize("seq", ["zero", "continue"])
async def test_a_restart_keeps_the_address_and_forgets_the_rest(seq: Any) -> None:
    async with listening() as (engine, tap):
        await publish(engine, 3)
        await eventually(lambda: len(tap.batches) == 3)
        url, endpoint, started = engine.url, engine.events_endpoint, engine.app.started
        await engine.restart(seq)
        assert (engine.url, engine.events_endpoint) == (url, endpoint)
        assert engine.app.started > started
        assert engine.app.cache.held() == {}
        assert await replay(engine.replay_endpoint, 0) == []
        await eventually(lambda: engine.subscribers == 1)
        await publish(engine, 1)
        await eventually(lambda: len(tap.batches) == 4)
        assert tap.batches[-1].seq == (0 if seq == "zero" else 3)


async def test_a_restart_is_seen_as_a_lost_connection() -> None:
    async with fleet(1) as (engine,):
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.subscribe(b"")
        socket.connect(engine.events_endpoint)
        try:
            await eventually(lambda: engine.subscribers == 1)
            await engine.restart()
            async with asyncio.timeout(5):
                await monitor.recv_multipart()
        finally:
            socket.disable_monitor()
            context.destroy(linger=0)


async def test_subscribers_are_counted_as_they_come_and_go() -> None:
    with socket_folder() as folder:
        async with SimEngine(SimConfig(events_endpoint=f"ipc://{folder}/e")) as engine:
            async with EventTap(engine.events_endpoint), EventTap(engine.events_endpoint):
                await eventually(lambda: engine.subscribers == 2)
            await eventually(lambda: engine.subscribers == 0)
