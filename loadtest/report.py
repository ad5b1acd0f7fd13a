"""The common form of benchmark results: claims, figures, machine, commit.

``report`` builds the object that ``--json`` prints; ``table`` shows the same to people;
``exit_status`` is 1 when a claim does not hold. A claim that could not be measured has
``holds: null`` and a reason; it is never left out and does not fail the run.
"""

import math
import operator
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

Op = Literal["<=", ">=", "<", ">", "=="]

_OPS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}

_ROOT = Path(__file__).resolve().parent.parent


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """A promise held against a measurement. Made by ``claim`` and ``unmeasured``."""

    name: str
    value: float | None
    op: Op
    limit: float
    holds: bool | None
    reason: str = ""


def claim(name: str, value: float, op: Op, limit: float) -> Claim:
    """A measured claim."""
    return Claim(name, value, op, limit, _OPS[op](value, limit))


def unmeasured(name: str, op: Op, limit: float, reason: str) -> Claim:
    """A claim that could not be measured here, and why."""
    return Claim(name, None, op, limit, None, reason)


def report(claims: Sequence[Claim], figures: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """The whole result as plain JSON values. ``figures`` is what was measured without a promise."""
    return {
        "claims": [msgspec.to_builtins(one) for one in claims],
        "figures": dict(figures),
        "runs": runs,
        "machine": machine(),
        "commit": commit(),
    }


def exit_status(result: Mapping[str, Any]) -> int:
    """1 if a claim does not hold, otherwise 0."""
    return int(any(one["holds"] is False for one in result["claims"]))


def show(result: Mapping[str, Any], title: str, as_json: bool) -> int:
    """Print the result on standard output, as one JSON object or as tables; returns the exit status."""
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        console = Console(file=sys.stdout)
        for one in tables(result, title):
            console.print(one)
        facts = result["machine"]
        console.print(
            f"{result['runs']} runs · commit {result['commit']} · {facts['cpu']}, {facts['cores']} cores, "
            f"Python {facts['python']}"
        )
    return exit_status(result)


def tables(result: Mapping[str, Any], title: str) -> list[Table]:
    """Figures (one row per name; columns where a figure is a mapping of numbers) and claims."""
    shown = []
    rows = {name: value for name, value in result["figures"].items() if name != "detail"}
    if rows:
        columns = list(dict.fromkeys(key for value in rows.values() for key in _columns(value)))
        figures = Table("figure", *columns, title=title)
        for name, value in rows.items():
            cells = _columns(value)
            figures.add_row(name, *(_number(cells.get(column)) for column in columns))
        shown.append(figures)
    if result["claims"]:
        claims = Table("claim", "value", "limit", "holds", title="claims")
        for one in result["claims"]:
            verdict = {True: "yes", False: "NO", None: f"not measured: {one.get('reason', '')}"}[one["holds"]]
            claims.add_row(one["name"], _number(one["value"]), f"{one['op']} {one['limit']:g}", verdict)
        shown.append(claims)
    return shown


def _columns(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {"value": value}


def _number(value: object) -> str:
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def machine() -> dict[str, Any]:
    """Facts a reader needs to compare: nothing that identifies the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of this source tree, with ``+`` when tracked files differ from it; "" outside git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median with its 95 % interval from order statistics: exact binomial ranks, no assumption about
    the shape. With fewer than 6 values no ranks reach 95 %, and the interval is the whole range."""
    ordered = sorted(values)
    count = len(ordered)
    rank, below = 0, 0.0
    # The k-th smallest and k-th largest enclose the median but for P(Binomial(n, 1/2) < k), twice.
    while (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    outer = max(rank - 1, 0)
    return statistics.median(ordered), ordered[outer], ordered[count - 1 - outer]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
