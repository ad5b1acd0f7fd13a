"""Which record leaves the memory first. One file per policy; this table is the only list of them."""

from collections.abc import Callable, Mapping

import msgspec

from policies.choice import BadPolicy, Choices, Entry
from policies.eviction import lirs, lru, prefix_cost
from policies.eviction.base import Eviction, Item

__all__ = ["DEFAULT", "EVICTIONS", "BadPolicy", "Eviction", "Item", "build", "params"]

Maker = Callable[..., Eviction]

EVICTIONS: Mapping[str, Entry[Eviction]] = {
    "lirs": (lirs.Params, lirs.Lirs),
    "lru": (lru.Params, lru.Lru),
    "prefix-cost": (prefix_cost.Params, prefix_cost.PrefixCost),
}
"""Name in the configuration -> (its parameters, its class). The parameters' Struct is its schema."""

DEFAULT = "lirs"
"""The best over all traces of ``loadtest.eviction_traces``; figures in docs/benchmarks.md."""

_CHOICES = Choices("eviction policy", EVICTIONS)


def build(spec: Mapping[str, object], capacity_bytes: int) -> Eviction:
    """The policy that ``{name: …, parameter: value, …}`` describes, for a memory of so many bytes; ``name``
    is one of ``EVICTIONS`` or ``module:Class``, made as ``Class(params, capacity_bytes)``. Raises
    ``BadPolicy`` for anything else."""
    given, maker = _CHOICES.find(spec)
    return maker(given, capacity_bytes)


def params(spec: Mapping[str, object]) -> msgspec.Struct:
    """The parameters that ``build`` would use, defaults filled in. Raises what ``build`` would."""
    return _CHOICES.find(spec)[0]
