"""Which worker gets a request. One file per policy; this table is the only list of them."""

import difflib
import importlib
import random
from collections.abc import Callable, Mapping

import msgspec

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


class BadPolicy(ValueError):
    """No policy can be made of a description; the text is for whoever wrote it. ``parameter`` is the
    key at fault: ``name`` or a parameter's."""

    def __init__(self, text: str, parameter: str = "name") -> None:
        super().__init__(text)
        self.parameter = parameter


def build(spec: Mapping[str, object], rng: random.Random) -> Policy:
    """The policy that ``{name: …, parameter: value, …}`` describes.

    ``name`` is one of ``POLICIES`` or ``module:Class``, a class of someone else's whose attribute
    ``Params`` is a msgspec Struct and which is made as ``Class(params, rng)``. Raises ``BadPolicy``
    for anything else.
    """
    given, maker = _made(spec)
    return maker(given, rng)


def params(spec: Mapping[str, object]) -> msgspec.Struct:
    """The parameters that ``build`` would use, defaults filled in. Raises what ``build`` would."""
    return _made(spec)[0]


def _made(spec: Mapping[str, object]) -> tuple[msgspec.Struct, Maker]:
    name = spec.get("name")
    if not isinstance(name, str):
        raise BadPolicy(f"policy needs a name, one of {', '.join(POLICIES)}")
    schema, maker = _entry(name)
    given = {key: value for key, value in spec.items() if key != "name"}
    known = schema.__struct_fields__
    for key in given:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise BadPolicy(f"policy {name} has no parameter {key!r}{_hint(key, known)}; {takes}", key)
    try:
        return msgspec.convert(given, schema), maker
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $.")
        text = f"policy {name}: {where or 'parameters'}: {what[:1].lower()}{what[1:]}"
        raise BadPolicy(text, where or "name") from None


def _entry(name: str) -> tuple[type[msgspec.Struct], Maker]:
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        raise BadPolicy(f"there is no policy {name!r}{_hint(name, POLICIES)}; known: {', '.join(POLICIES)}")
    module, _, attribute = name.partition(":")
    try:
        maker = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadPolicy(f"policy {name!r} cannot be imported: {error}") from None
    schema = getattr(maker, "Params", None)
    if not (isinstance(schema, type) and issubclass(schema, msgspec.Struct)):
        raise BadPolicy(f"policy {name!r} needs an attribute Params, a msgspec Struct, for its parameters")
    return schema, maker


def _hint(wrong: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(wrong.replace("_", "-") if "-" in "".join(known) else wrong, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
