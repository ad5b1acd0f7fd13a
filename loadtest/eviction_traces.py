"""Which eviction policy keeps what is read again? Hit rates of every policy over traces of different kinds.

A read is a prompt as a list of record names from its start on; its hit is the leading part that is held. The
rest is stored, as a node does, and what does not fit evicts. The figure is the share of all records read that
were hits, from a cold start. No policy can beat the share of a loop that fits: 0.8 of 1.25 times the memory.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from policies.eviction import EVICTIONS, Eviction, Item, build

RECORD_BYTES = 1000
RECORD_TOKENS = 256
Read = Sequence[int]


def replay(policy: Eviction, reads: Iterable[Read], capacity_bytes: int) -> float:
    """The share of hits. Every record has the same size; of a prompt, what fits is stored."""
    slots: dict[int, int] = {}
    names: dict[int, int] = {}
    number = hits = total = 0
    most = capacity_bytes // RECORD_BYTES
    for read in reads:
        total += len(read)
        own: set[int] = set()
        parent = -1
        missed = False
        for depth, name in enumerate(read):
            slot = slots.get(name)
            if slot is not None:
                hits += not missed
                policy.use(slot)
            else:
                missed = True
                if len(slots) >= most and not _evict(policy, slots, names, own | {parent}):
                    break
                slot, number = number, number + 1
                identity = name.to_bytes(16, "little")
                first = RECORD_TOKENS * depth
                policy.add(Item(slot, identity, parent, RECORD_BYTES, first, RECORD_TOKENS))
                slots[name], names[slot] = slot, name
            own.add(slot)
            parent = slot
    return hits / total


def _evict(policy: Eviction, slots: dict[int, int], names: dict[int, int], held: set[int]) -> bool:
    for victim in policy.victims(held.__contains__):
        policy.remove(victim)
        del slots[names.pop(victim)]
        return True
    return False


def loop(documents: int, records: int, passes: int) -> Iterator[Read]:
    """The same documents in the same order, again and again."""
    for _ in range(passes):
        for document in range(documents):
            yield range(document * records, (document + 1) * records)


def zipf(documents: int, records: int, reads: int, exponent: float, seed: int = 1) -> Iterator[Read]:
    """Documents by popularity."""
    weights = [1 / (rank + 1) ** exponent for rank in range(documents)]
    for document in random.Random(seed).choices(range(documents), weights, k=reads):
        yield range(document * records, (document + 1) * records)


def scans(hot: int, cold: int, rounds: int, records: int) -> Iterator[Read]:
    """A hot set read twice a round; between rounds many documents that are read once."""
    fresh = hot * records
    for _ in range(rounds):
        for document in [*range(hot), *range(hot)]:
            yield range(document * records, (document + 1) * records)
        for _ in range(cold):
            yield range(fresh, fresh + records)
            fresh += records


def conversations(alive: int, turns: int, count: int, seed: int = 2) -> Iterator[Read]:
    """Growing prompts under one system prompt; so many are alive at a time, each for so many turns."""
    rng, fresh = random.Random(seed), 3
    prompts: list[list[int]] = []
    for _ in range(count * turns):
        if len(prompts) < alive:
            prompts.append([0, 1, 2])
        prompt = rng.choice(prompts)
        for _ in range(rng.randrange(1, 4)):
            prompt.append(fresh)
            fresh += 1
        yield list(prompt)
        if len(prompt) > 2 * turns:
            prompts.remove(prompt)


def public(folder: Path) -> dict[str, list[Read]]:
    """The public traces that lie in ``folder``, where they do."""
    found: dict[str, list[Read]] = {}
    file = folder / "mooncake_conversation_trace.jsonl"
    if file.exists():
        found["mooncake"] = [json.loads(line)["hash_ids"] for line in file.read_text().splitlines()]
    file = folder / "agent_conversations.jsonl"
    if file.exists():
        timed: list[tuple[float, Read]] = []
        for number, line in enumerate(file.read_text().splitlines()):
            for request in json.loads(line)["requests"]:
                names = [number * 10**7 + name for name in request.get("hash_ids", [])[3::4]]
                timed.append((float(request["t"]), names))
        found["agents"] = [read for _, read in sorted(timed, key=lambda pair: pair[0]) if read]
    return found


def traces(folder: Path | None) -> dict[str, tuple[list[Read], int]]:
    """Name -> (reads, capacity in records)."""
    made: dict[str, tuple[list[Read], int]] = {
        "loop of 1.25 times the memory": (list(loop(100, 10, 20)), 800),
        "zipf 1.0": (list(zipf(400, 10, 6000, 1.0)), 800),
        "zipf 0.7": (list(zipf(400, 10, 6000, 0.7)), 800),
        "hot set and scans": (list(scans(40, 120, 20, 10)), 800),
        "conversations": (list(conversations(40, 12, 150)), 800),
    }
    for name, reads in (public(folder) if folder else {}).items():
        distinct = len({name for read in reads for name in read})
        for share in (0.05, 0.2):
            made[f"{name}, memory {share:.0%} of the set"] = (reads, max(100, int(share * distinct)))
    return made


def table(folder: Path | None, only: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Trace -> policy -> hit rate."""
    rates: dict[str, dict[str, float]] = {}
    for trace, (reads, records) in traces(folder).items():
        if only and trace not in only:
            continue
        size = records * RECORD_BYTES
        rates[trace] = {name: replay(build({"name": name}, size), reads, size) for name in EVICTIONS}
    return rates


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m loadtest.eviction_traces``: prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--traces", type=Path, help="a folder with public traces")
    options = parser.parse_args(arguments)
    rates = table(options.traces)
    if options.json:
        print(json.dumps(rates, indent=2))
        return 0
    print(f"{'':<36}" + "".join(f"{name:>13}" for name in EVICTIONS))
    for trace, row in rates.items():
        print(f"{trace:<36}" + "".join(f"{rate:>13.3f}" for rate in row.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
