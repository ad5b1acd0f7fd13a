"""Which worker gets a request. One file per policy; this table is the only list of them."""

import random
from collections.abc import Callable, Mapping

import msgspec

from policies.choice import BadPolicy, Choices
from policies.routing import (
    consistent_hash,
    learned_prefix,
    least_loaded,
    power_of_two,
    prefix,
    round_robin,
    session,
    uniform,
)
from policies.routing.base import Ask, Candidate, Choice, Policy, Trust

__all__ = [
    "POLICIES",
    "Ask",
    "BadPolicy",
    "Candidate",
    "Choice",
    "Policy",
    "Trust",
    "build",
    "params",
]

Maker = Callable[..., Policy]

POLICIES: Mapping[str, tuple[type[msgspec.Struct], Maker]] = {
    "round-robin": (round_robin.Params, round_robin.RoundRobin),
    "random": (uniform.Params, uniform.Uniform),
    "least-loaded": (least_loaded.Params, least_loaded.LeastLoaded),
    "power-of-two": (power_of_two.Params, power_of_two.PowerOfTwo),
    "session": (session.Params, session.Session),
    "consistent-hash": (consistent_hash.Params, consistent_hash.ConsistentHash),
    "prefix": (prefix.Params, prefix.Prefix),
    "learned-prefix": (learned_prefix.Params, learned_prefix.LearnedPrefix),
}
"""Name in the configuration -> (its parameters, its class). The parameters' Struct is its schema."""


_CHOICES = Choices("policy", POLICIES)


def build(spec: Mapping[str, object], rng: random.Random) -> Policy:
    """The policy that ``{name: …, parameter: value, …}`` describes.

    ``name`` is one of ``POLICIES`` or ``module:Class``, a class of someone else's whose attribute
    ``Params`` is a msgspec Struct and which is made as ``Class(params, rng)``. Raises ``BadPolicy``
    for anything else.
    """
    given, maker = _CHOICES.find(spec)
    return maker(given, rng)


def params(spec: Mapping[str, object]) -> msgspec.Struct:
    """The parameters that ``build`` would use, defaults filled in. Raises what ``build`` would."""
    return _CHOICES.find(spec)[0]
