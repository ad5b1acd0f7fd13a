"""From a description to a policy: the table, strangers, and what a mistake is told."""

import random
import sys
import types
from collections.abc import Sequence

import msgspec
import pytest

from policies.routing import POLICIES, Ask, BadPolicy, Candidate, Choice, build, params


class First:
    """A policy of someone else's."""

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        offset: int = 0

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._offset = params.offset

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        names = sorted(candidate.worker for candidate in candidates)
        return Choice(names[self._offset % len(names)], {"offset": self._offset})


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("someones_policies")
    module.First = First  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "someones_policies", module)
    return "someones_policies:First"


def test_names_and_parameters_keep_the_house_style() -> None:
    for name, (schema, _) in POLICIES.items():
        assert name == name.lower()
        assert "_" not in name
        assert schema.__struct_config__.frozen
        assert schema.__struct_config__.forbid_unknown_fields
        assert schema.__doc__
        for parameter in schema.__struct_fields__:
            assert f"``{parameter}``" in schema.__doc__ or name == "learned-prefix"
        assert params({"name": name}) == schema()  # every parameter has a default


def test_a_stranger_is_loaded_by_module_and_class(stranger: str) -> None:
    policy = build({"name": stranger, "offset": 1}, random.Random(0))
    assert policy.choose(Ask(1), [Candidate("b"), Candidate("a")]).worker == "b"


@pytest.mark.parametrize(
    ("parameters", "at", "text"),
    [
        ({"ofset": 1}, "ofset", "has no parameter 'ofset' (did you mean 'offset'?); it takes offset"),
        ({"offset": "x"}, "offset", "offset: expected int, got str"),
    ],
)
def test_a_strangers_parameters_are_checked_too(
    stranger: str, parameters: dict[str, object], at: str, text: str
) -> None:
    with pytest.raises(BadPolicy) as caught:
        build({"name": stranger, **parameters}, random.Random(0))
    assert caught.value.parameter == at
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "at", "text"),
    [
        ({}, "name", "policy needs a name"),
        ({"name": 5}, "name", "policy needs a name"),
        ({"name": "least_loaded"}, "name", "did you mean 'least-loaded'?"),
        ({"name": "learnd-prefix"}, "name", "did you mean 'learned-prefix'?"),
        ({"name": "zzz"}, "name", "there is no policy 'zzz'; known: round-robin,"),
        ({"name": "prefix", "slack-tokens": 1}, "slack-tokens", "did you mean 'slack_tokens'?"),
        ({"name": "prefix", "slack_tokens": 1.5}, "slack_tokens", "slack_tokens: expected int, got float"),
        ({"name": "session", "max_sessions": 0}, "max_sessions", "max_sessions: expected int >= 1"),
        ({"name": "consistent-hash", "bound": 0.9}, "bound", "bound: expected float >= 1.0"),
        ({"name": "consistent-hash", "key": "user"}, "key", "key: invalid enum value 'user'"),
        ({"name": "no.such:Thing"}, "name", "cannot be imported: No module named 'no'"),
        ({"name": "random:Thing"}, "name", "cannot be imported"),
        ({"name": ":"}, "name", "cannot be imported"),
        ({"name": "random:Random"}, "name", "needs an attribute Params"),
    ],
)
def test_mistakes(spec: dict[str, object], at: str, text: str) -> None:
    with pytest.raises(BadPolicy) as caught:
        build(spec, random.Random(0))
    assert caught.value.parameter == at
    assert text in str(caught.value)
