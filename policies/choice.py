"""A table of classes that are chosen by name, with their parameters: what every kind of policy shares."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

Made = TypeVar("Made")
Entry = tuple[type[msgspec.Struct], Callable[..., Made]]


class BadPolicy(ValueError):
    """No policy can be made of a description; the text is for whoever wrote it. ``parameter`` is the
    key at fault: ``name`` or a parameter's."""

    def __init__(self, text: str, parameter: str = "name") -> None:
        super().__init__(text)
        self.parameter = parameter


class Choices(Generic[Made]):
    """``kind`` is what they are called in messages. ``table``: name in the configuration -> (parameters,
    class). Besides, ``module:Class`` names a class of someone else's whose attribute ``Params`` is a msgspec
    Struct."""

    def __init__(self, kind: str, table: Mapping[str, Entry[Made]]) -> None:
        self.kind, self.table = kind, table

    def find(self, spec: Mapping[str, object]) -> tuple[msgspec.Struct, Callable[..., Made]]:
        """The parameters, defaults filled in, and the class that ``{name: …, parameter: value, …}``
        describes. Raises ``BadPolicy`` for anything else."""
        name = spec.get("name")
        if not isinstance(name, str):
            raise BadPolicy(f"{self.kind} needs a name, one of {', '.join(self.table)}")
        schema, maker = self._entry(name)
        given = {key: value for key, value in spec.items() if key != "name"}
        known = schema.__struct_fields__
        for key in given:
            if key not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise BadPolicy(
                    f"{self.kind} {name} has no parameter {key!r}{_hint(key, known)}; {takes}", key
                )
        try:
            return msgspec.convert(given, schema), maker
        except msgspec.ValidationError as error:
            what, _, where = str(error).replace("`", "").partition(" - at $.")
            text = f"{self.kind} {name}: {where or 'parameters'}: {what[:1].lower()}{what[1:]}"
            raise BadPolicy(text, where or "name") from None

    def _entry(self, name: str) -> Entry[Made]:
        if name in self.table:
            return self.table[name]
        if ":" not in name:
            known = ", ".join(self.table)
            raise BadPolicy(f"there is no {self.kind} {name!r}{_hint(name, self.table)}; known: {known}")
        module, _, attribute = name.partition(":")
        try:
            maker: Any = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise BadPolicy(f"{self.kind} {name!r} cannot be imported: {error}") from None
        schema = getattr(maker, "Params", None)
        if not (isinstance(schema, type) and issubclass(schema, msgspec.Struct)):
            text = f"{self.kind} {name!r} needs an attribute Params, a msgspec Struct, for its parameters"
            raise BadPolicy(text)
        return schema, maker


def _hint(wrong: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(wrong.replace("_", "-") if "-" in "".join(known) else wrong, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
