"""Whatever happens to its events, after quiet the index says what the engine holds.

The engine is the simulated one with a small cache, so blocks are evicted all the time, behind a real
event stream whose batches are lost, doubled, delayed and reordered, and which restarts now and then.
"""

import asyncio
import random
from typing import Any

import httpx
import pytest

from cacheindex.events import Tier
from cacheindex.hub import Hub, SourceSpec
from cacheindex.keys import Namespace, prompt_keys
from cacheindex.table import Table, by_holder
from loadtest.harness import eventually, fleet
from loadtest.sim.config import SimConfig
from loadtest.simengine import SimEngine

RUNS = 24
REQUESTS = 40
SECRET = b"s" * 32
GPU: Tier = "gpu"

FAULTS: list[dict[str, Any]] = [
    {},
    {"drop_events": 0.05},
    {"drop_events": 0.3},
    {"duplicate_events": 0.3},
    {"reorder_events": 0.3},
    {"delay_events": 0.005},
    {"drop_events": 0.2, "duplicate_events": 0.2, "reorder_events": 0.2},
    {"garbage_events": 5},
]


def truth_and_index(engine: SimEngine, table: Table, prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Cached tokens of each prompt by the engine's own books, and by the index."""
    root = Namespace("sim").root(SECRET)
    held = engine.app.cache.held()
    known = {prefix for prefixes in held.values() for prefix in prefixes}
    size = engine.config.block_size
    truth, index = [], []
    for prompt in prompts:
        reach = 0
        while reach + size <= len(prompt) and tuple(prompt[: reach + size]) in known:
            reach += size
        truth.append(reach - reach % 16)
        found = by_holder(table.match(prompt_keys(root, prompt)))
        index.append(found.get("w", {}).get(GPU, 0))
    return truth, index


def prompts_of(rng: random.Random) -> list[list[int]]:
    stems = [[rng.randrange(256) for _ in range(rng.randrange(20, 200))] for _ in range(4)]
    return [
        [*rng.choice(stems), *(rng.randrange(256) for _ in range(rng.randrange(1, 90)))]
        for _ in range(REQUESTS)
    ]


async def drive(engine: SimEngine, prompts: list[list[int]], rng: random.Random) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:

        async def ask(prompt: list[int]) -> None:
            body = {"model": "sim", "prompt": prompt, "max_tokens": rng.randrange(1, 40)}
            answer = await client.post(engine.url + "/v1/completions", json=body)
            assert answer.status_code == 200

        for start in range(0, len(prompts), 4):
            await asyncio.gather(*(ask(prompt) for prompt in prompts[start : start + 4]))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(RUNS))
async def test_the_index_converges_to_the_engines_truth(seed: int) -> None:
    rng = random.Random(seed)
    sim = SimConfig(
        block_size=rng.choice([1, 16, 32]),
        num_blocks=0,
        encoding=rng.choice(["map", "array"]),
        hash_form=rng.choice(["int", "bytes", "str"]),
        output_tokens=24,
    )
    sim = type(sim)(
        **{f: getattr(sim, f) for f in sim.__struct_fields__} | {"num_blocks": 1200 // sim.block_size}
    )
    table = Table(50_000_000)
    hub = Hub(table, secret=SECRET)
    hub.start()
    try:
        async with fleet(1, config=sim) as (engine,):
            spec = SourceSpec("w", "sim", engine.events_endpoint, engine.replay_endpoint)
            hub.watch(spec)
            await eventually(lambda: engine.subscribers > 0, what="the hub subscribes")
            prompts = prompts_of(rng)
            faults = rng.choice(FAULTS)
            engine.set_faults(seed=seed, **faults)
            half = len(prompts) // 2
            await drive(engine, prompts[:half], rng)
            if seed % 4 == 3:
                await engine.restart(rng.choice(["zero", "continue"]))
                await eventually(lambda: engine.subscribers > 0, what="the hub subscribes again")
            await drive(engine, prompts[half:], rng)
            engine.clear_faults()
            # One more batch, so that a loss at the very end can be noticed at all.
            await drive(engine, [[1] * 64], rng)

            def agreed() -> bool:
                truth, index = truth_and_index(engine, table, prompts)
                return truth == index

            await eventually(agreed, deadline=10, what=f"seed {seed}: index equals truth ({faults})")
            assert any(truth_and_index(engine, table, prompts)[0]), (
                "something must be held to be worth a test"
            )
            table.check_integrity()
    finally:
        hub.close()
