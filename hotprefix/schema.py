"""A msgspec Struct read as a list of keys. A section is a Struct inside; all else is a leaf with a dotted
key, from which its flag and its variable follow. Knows neither files nor any particular schema."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

PREFIX = "HOTPREFIX_"


class Leaf(msgspec.Struct, frozen=True):
    """One value that can be set. ``type`` is its annotation, ``info`` the same as msgspec sees it,
    ``variables`` what its variable's name begins with."""

    key: str
    type: Any
    info: inspect.Type
    variables: str = PREFIX

    @property
    def flag(self) -> str:
        return "--" + self.key.replace(".", "-").replace("_", "-")

    @property
    def variable(self) -> str:
        return self.variables + self.key.replace(".", "_").upper()

    @property
    def text(self) -> bool:
        """Whether a flag's or variable's text is the value itself, not YAML that describes it."""
        return any(isinstance(one, inspect.StrType | inspect.LiteralType) for one in _options(self.info))

    @property
    def optional(self) -> bool:
        return any(isinstance(one, inspect.NoneType) for one in _options(self.info))

    @property
    def many(self) -> bool:
        return isinstance(self.info, inspect.ListType)


def leaves(schema: type[msgspec.Struct], prefix: str = "", variables: str = PREFIX) -> dict[str, Leaf]:
    """Every leaf of ``schema`` by its dotted key, in the schema's order."""
    found: dict[str, Leaf] = {}
    hints = get_type_hints(schema, include_extras=True)
    for field in _fields(schema):
        key = prefix + field.encode_name
        if isinstance(field.type, inspect.StructType):
            found |= leaves(field.type.cls, f"{key}.", variables)
        else:
            found[key] = Leaf(key, hints[field.name], field.type, variables)
    return found


def nearest(wrong: str, known: Iterable[str], strip: str = "") -> str:
    """`` (did you mean …?)`` for a key that resembles a known one, else the empty string. ``strip``
    begins all of them and says nothing about likeness."""
    near = difflib.get_close_matches(wrong.removeprefix(strip), [one.removeprefix(strip) for one in known], 1)
    return f" (did you mean {strip}{near[0]}?)" if near else ""


def unknown_keys(value: object, info: inspect.Type, path: str) -> Iterator[tuple[str, str]]:
    """Paths in ``value`` that no Struct of its type has, each with a hint."""
    for one in _options(info):
        if isinstance(one, inspect.ListType) and isinstance(value, list):
            for place, item in enumerate(value):
                yield from unknown_keys(item, one.item_type, f"{path}[{place}]")
        elif isinstance(one, inspect.StructType) and isinstance(value, dict):
            known = {field.encode_name: field.type for field in one.fields}
            for key, item in value.items():
                if key in known:
                    yield from unknown_keys(item, known[key], f"{path}.{key}")
                else:
                    yield f"{path}.{key}", nearest(str(key), known)


def flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    """The scalars of ``value`` with their paths: ``workers[0].url``. Empty maps and lists are scalars."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for place, item in enumerate(value):
            yield from flatten(item, f"{path}[{place}]")
    else:
        yield path, value


def _fields(schema: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(schema)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _options(info: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(info, inspect.Metadata):
        return _options(info.type)
    return info.types if isinstance(info, inspect.UnionType) else (info,)
