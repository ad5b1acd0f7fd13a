"""From the samples of the scenario ``node`` to its claims and figures. Pure: numbers in, numbers out.

The value of a ratio is the median over pairs, and its row shows the 95 % interval. Where two systems are
compared by what a load adds to a local hit, that is the median of the differences.
"""

import re
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from loadtest.node_phases import Pair
from loadtest.report import Claim, Op, claim, median_interval, unmeasured

LIMITS: dict[str, tuple[Op, float]] = {
    "node.store_vs_lmcache": (">=", 1.5),
    "node.load_vs_lmcache": (">=", 1.5),
    "engines.other_engine_ttft": ("<=", 1.15),
    "engines.own_hit": ("<=", 1.02),
    "engines.first_read": ("<=", 1.02),
    "engines.readable_s": ("<=", 1.0),
    "engines.itl_while_storing": ("<=", 1.05),
    "engines.reread_vs_local_hit": ("<=", 1.6),
    "engines.reread_vs_lmcache": ("<=", 0.85),
    "engines.zipf_ttft": ("<=", 1.0),
    "engines.restart_ttft": ("<=", 1.2),
}
"""Every claim of the scenario. ``engines.readable_s``: the longest time from a first token until all records
of that first read could be read."""

MIN_LOAD_S = 0.001
"""A load cannot be told from a local hit more closely than this."""


class Samples(msgspec.Struct, kw_only=True):
    """What was measured; a phase that did not run left its list empty, and ``absent`` may say why."""

    first_read: list[Pair] = []
    readable: list[float] = []
    own_hit: list[Pair] = []
    itl: list[Pair] = []
    other_engine: list[Pair] = []
    restart: list[Pair] = []
    """(after, before)."""
    zipf: list[list[Pair]] = []
    """One list a run."""
    loads: list[Pair] = []
    """(load, local hit), ours."""
    peer_loads: list[Pair] = []
    stores: list[float] = []
    """Seconds from a first token until all could be read."""
    store_gb_s: float = 0.0
    """Ours, from ``stores``: the whole store, which begins after the first token."""
    peer_store_gb_s: float = 0.0
    """Of the peer's own log, since its stores begin before the first token."""
    reread: list[Pair] = []
    peer_reread: list[Pair] = []
    absent: dict[str, str] = {}
    """Claim to reason."""


def claims(samples: Samples) -> list[Claim]:
    """All of ``LIMITS``, in that order."""
    values = _values(samples)
    return [
        claim(name, values[name], *limit)
        if name in values
        else unmeasured(name, *limit, samples.absent.get(name, "its phase was left out"))
        for name, limit in LIMITS.items()
    ]


def _values(samples: Samples) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, pairs in {
        "engines.other_engine_ttft": samples.other_engine,
        "engines.own_hit": samples.own_hit,
        "engines.first_read": samples.first_read,
        "engines.itl_while_storing": samples.itl,
        "engines.reread_vs_local_hit": samples.reread,
        "engines.restart_ttft": samples.restart,
    }.items():
        if pairs:
            values[name] = statistics.median(ratios(pairs))
    if samples.readable:
        values["engines.readable_s"] = max(samples.readable)
    if samples.reread and samples.peer_reread:
        ours, theirs = ([read for read, _ in pairs] for pairs in (samples.reread, samples.peer_reread))
        values["engines.reread_vs_lmcache"] = statistics.median(ratios(list(zip(ours, theirs, strict=True))))
    if samples.zipf:
        values["engines.zipf_ttft"] = mean_ratio([pair for run in samples.zipf for pair in run])
    if samples.loads and samples.peer_loads:
        values["node.load_vs_lmcache"] = load_s(samples.peer_loads) / load_s(samples.loads)
    if samples.store_gb_s and samples.peer_store_gb_s:
        values["node.store_vs_lmcache"] = samples.store_gb_s / samples.peer_store_gb_s
    return values


def figures(samples: Samples, document_bytes: int) -> dict[str, Any]:
    """One row a claim with both sides, pairs, and the interval of the ratio."""
    rows: dict[str, Any] = {}
    for name, pairs in {
        "first_read": samples.first_read,
        "own_hit": samples.own_hit,
        "itl_while_storing": samples.itl,
        "other_engine": samples.other_engine,
        "restart": samples.restart,
        "reread": samples.reread,
        "reread, lmcache": samples.peer_reread,
        "load": samples.loads,
        "load, lmcache": samples.peer_loads,
    }.items():
        if pairs:
            rows[name] = _row(pairs)
    for run, pairs in enumerate(samples.zipf, 1):
        rows[f"zipf, run {run}"] = {**_row(pairs), "mean_ratio": mean_ratio(pairs)}
    for name, pairs in {"load": samples.loads, "load, lmcache": samples.peer_loads}.items():
        if pairs:
            rows[name]["gb_s"] = document_bytes / load_s(pairs) / 1e9
    for name, rate in {"store": samples.store_gb_s, "store, lmcache": samples.peer_store_gb_s}.items():
        if rate:
            rows[name] = {"gb_s": rate}
    if samples.stores:
        rows["store"]["ms"] = 1e3 * statistics.median(samples.stores)
    if samples.readable:
        rows["readable_s"] = {
            "ms": 1e3 * statistics.median(samples.readable),
            "max_ms": 1e3 * max(samples.readable),
        }
    return rows


def _row(pairs: Sequence[Pair]) -> dict[str, float]:
    middle, low, high = median_interval(ratios(pairs))
    return {
        "ms": 1e3 * statistics.median(one for one, _ in pairs),
        "against_ms": 1e3 * statistics.median(other for _, other in pairs),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "pairs": len(pairs),
    }


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """First over second."""
    return [one / other for one, other in pairs]


def mean_ratio(pairs: Sequence[Pair]) -> float:
    """Ratio of the means."""
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs)


def load_s(pairs: Sequence[Pair]) -> float:
    """Seconds that a load adds to a local hit."""
    return max(MIN_LOAD_S, statistics.median(load - hit for load, hit in pairs))


_STORED = re.compile(r"Stored (\d+) tokens in ([\d.]+) seconds")


def lmcache_store_rate(log: str, bytes_per_token: int, at_least: int = 1024) -> float:
    """GB/s of the stores in LMCache's log, the median over those of so many tokens; 0 without any. Its own
    times: from the engine's request for space to its commit."""
    rates = [
        int(tokens) * bytes_per_token / max(float(seconds), 0.0005) / 1e9
        for tokens, seconds in _STORED.findall(log)
        if int(tokens) >= at_least
    ]
    return statistics.median(rates) if rates else 0.0
