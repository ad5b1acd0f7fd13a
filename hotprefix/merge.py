"""A process's configuration from its four layers: defaults, then a YAML file (``--config`` or a variable),
then ``HOTPREFIX_…`` variables, then flags. Each replaces a key's value whole.

Every key of a process's Struct is a flag and a variable: ``listen.port`` is ``--listen-port`` and, for the
gateway, ``HOTPREFIX_LISTEN_PORT``. Lists and maps are given to those as YAML or JSON.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from hotprefix import layers
from hotprefix.errors import UserError
from hotprefix.layers import Given, Layer
from hotprefix.schema import PREFIX, Leaf, flatten, leaves, unknown_keys

Config = TypeVar("Config", bound=msgspec.Struct)
Short = Callable[[object], object]

USERINFO = re.compile(r"(://)[^/@\s]+@")
HIDDEN = "***"


class SettingsError(UserError):
    """The configuration cannot be used. ``problems``: one line each, with its place; the text is all
    of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join(["the configuration cannot be used:", *self.problems]))


class Loaded(msgspec.Struct, Generic[Config], frozen=True):
    """``origins`` says of every key where its value is from: ``default``, ``file PATH:LINE``, the
    variable or the flag. Parts of lists and maps that were written have an origin of their own
    (``workers[0].url``); parts that have none took their default."""

    config: Config
    origins: Mapping[str, str]


class Process(Generic[Config]):
    """What can be told to one kind of process. ``config_variable`` names its file, ``variables`` begins its
    variables. ``check`` says what is wrong beyond types. ``aliases``: flags that people know from elsewhere,
    each with its key. ``secrets``: keys whose values are never shown. ``short``: keys whose value may be
    written shorter, and how it is then written out. ``policy``: the key of a choice, and what its parameters
    are with defaults filled in."""

    def __init__(
        self,
        schema: type[Config],
        check: Callable[[Config], list[tuple[str, str]]],
        *,
        config_variable: str,
        policy: tuple[str, Callable[[Mapping[str, object]], msgspec.Struct]],
        variables: str = PREFIX,
        aliases: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        short: Mapping[str, Short] | None = None,
    ) -> None:
        self.schema, self._check = schema, check
        self.config_variable, self._policy = config_variable, policy
        self.variables = variables
        self.leaves: dict[str, Leaf] = leaves(schema, variables=variables)
        self.aliases, self.secrets, self._short = dict(aliases or {}), secrets, dict(short or {})

    def load(self, argv: Sequence[str], environ: Mapping[str, str]) -> Loaded[Config]:
        """The checked configuration that ``argv`` (flags only) and ``environ`` describe. Raises
        ``SettingsError`` with all that is wrong, not only the first."""
        path, flags, found = self._config_file(argv, environ)
        stack = [
            layers.from_file(path, self.leaves) if path else Layer(),
            layers.from_environ(environ, self.leaves, self.variables),
            layers.from_flags(flags, self.leaves, self.aliases),
        ]
        given: dict[str, Given] = {}
        for layer in stack:
            found += layer.problems
            given |= layer.given
        values, refused = self._typed(given)
        found += refused.values()
        config = self._assemble(values)
        for key, text in self._check(config):
            leaf = self._leaf_of(key)
            if leaf not in refused:
                found.append(f"{_at(given.get(leaf), key)}: {key}: {text}")
        if found:
            raise SettingsError(found)
        return Loaded(config, self._origins(given))

    def _config_file(
        self, argv: Sequence[str], environ: Mapping[str, str]
    ) -> tuple[str, list[str], list[str]]:
        """The file's path or "", the other arguments, and problems."""
        path, rest, found = environ.get(self.config_variable, ""), [], []
        words, seen = list(argv), False
        while words:
            flag, equals, text = words.pop(0).partition("=")
            if flag != "--config":
                rest.append(flag + equals + text)
                continue
            if not equals:
                text = words.pop(0) if words and not words[0].startswith("--") else ""
            if not text or seen:
                found.append("--config: is given twice" if text else "--config: needs a path")
            path, seen = text or path, True
        return path, rest, found

    def _typed(self, given: dict[str, Given]) -> tuple[dict[str, object], dict[str, str]]:
        """The values, as their types want them, and for keys whose value is not, the problem. Short forms
        in ``given`` are written out."""
        values: dict[str, object] = {}
        refused: dict[str, str] = {}
        for key, short in given.items():
            leaf = self.leaves[key]
            value = self._short[key](short.value) if key in self._short else short.value
            given[key] = one = Given(value, short.origin, short.places)
            wrong = [
                f"{_at(one, path)}: {path}: is no known key{hint}"
                for path, hint in unknown_keys(value, leaf.info, key)
            ] or [f"{one.origin}: {key}: is not Unicode text"] * (not _is_text(value))
            if wrong:
                refused[key] = "\n  ".join(wrong)
                continue
            try:
                values[key] = msgspec.to_builtins(msgspec.convert(value, leaf.type))
            except msgspec.ValidationError as error:
                path, what = _explain(key, str(error))
                refused[key] = f"{_at(one, path)}: {path}: {what}"
        return values, refused

    def _assemble(self, values: Mapping[str, object]) -> Config:
        """The defaults with ``values`` in their places. Leaf by leaf, because a section's default may
        differ from its type's: ``admin`` has another port than any ``Listen``."""
        tree = msgspec.to_builtins(self.schema())
        for key, value in values.items():
            *sections, name = key.split(".")
            branch = tree
            for section in sections:
                branch = branch[section]
            branch[name] = value
        return msgspec.convert(tree, self.schema)

    def _origins(self, given: Mapping[str, Given]) -> dict[str, str]:
        origins = dict.fromkeys(self.leaves, "default")
        for key, one in given.items():
            origins |= {path: one.place(path) for path, _ in flatten(one.value, key)}
            origins[key] = one.origin
        return origins

    def _leaf_of(self, path: str) -> str:
        """The leaf that ``path`` lies in."""
        while path not in self.leaves:
            path = re.sub(r"(\.[^.\[]*|\[\d+\])$", "", path)
        return path

    def usage(self) -> str:
        """All flags and variables, for ``--help``."""
        rows = "\n".join(map(self._leaf_help, self.leaves.values()))
        return f"  {'--config FILE':<34} {self.config_variable}\n{rows}\n"

    def _leaf_help(self, leaf: Leaf) -> str:
        also = [flag for flag, key in self.aliases.items() if key == leaf.key]
        return f"  {', '.join([leaf.flag, *also]):<34} {leaf.variable}"

    def shown_json(self, loaded: Loaded[Config]) -> str:
        """``{"config": …, "origins": …}``, where ``config`` is fit to be a configuration file."""
        shown = {"config": self._shown(loaded.config), "origins": dict(loaded.origins)}
        return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()

    def shown_table(self, loaded: Loaded[Config]) -> str:
        """A line for every key: its path, its value as JSON, its origin."""
        rows = [
            (path, msgspec.json.encode(value).decode(), loaded.origins.get(path, "default"))
            for path, value in flatten(self._shown(loaded.config), "")
        ]
        keys, values = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(
            f"{key:<{keys}}  {value:<{min(values, 48)}}  {origin}" for key, value, origin in rows
        )

    def _shown(self, config: Config) -> dict[str, object]:
        """The configuration as plain values, with the policy's defaults written out and secrets hidden."""
        tree = msgspec.to_builtins(config)
        key, params = self._policy
        tree[key] = {"name": tree[key]["name"], **msgspec.to_builtins(params(tree[key]))}
        hidden: dict[str, object] = self._hidden(tree, "")
        return hidden

    def _hidden(self, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {n: self._hidden(item, f"{key}.{n}" if key else n) for n, item in value.items()}
        if isinstance(value, list):
            return [self._hidden(item, f"{key}[]") for item in value]
        if value is not None and key in self.secrets:
            return HIDDEN
        return USERINFO.sub(rf"\g<1>{HIDDEN}@", value) if isinstance(value, str) else value


def _is_text(value: object) -> bool:
    """Whether all strings in ``value`` can be encoded: an environment may hold bytes that are no UTF-8."""
    parts = [part for pair in flatten(value, "") for part in pair if isinstance(part, str)]
    return not any("\ud800" <= letter <= "\udfff" for part in parts for letter in part)


def _explain(key: str, error: str) -> tuple[str, str]:
    """msgspec's ``Expected `int`, got `str` - at `$[0].rank``` as a path and a sentence."""
    what, _, where = error.replace(" - at `key` in `$", " - at `$").partition(" - at `$")
    path = key + where.rstrip("`").replace("[...]", "")
    return path, what[:1].lower() + what[1:].replace("`", "")


def _at(given: Given | None, path: str) -> str:
    """Where ``path`` was written, as a problem says it."""
    return given.place(path).removeprefix("file ") if given else "default"
