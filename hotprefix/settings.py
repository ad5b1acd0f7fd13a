"""The gateway's configuration from its four layers: defaults, then a YAML file (``--config`` or
``HOTPREFIX_CONFIG``), then ``HOTPREFIX_…`` variables, then flags. Each replaces a key's value whole.

Every key of ``gateway.config.Gateway`` is a flag and a variable: ``listen.port`` is ``--listen-port``
and ``HOTPREFIX_LISTEN_PORT``. Lists and maps are given to those as YAML or JSON.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.config import Gateway
from gateway.config_check import problems as check_config
from hotprefix import layers
from hotprefix.errors import UserError
from hotprefix.layers import Given, Layer
from hotprefix.schema import Leaf, flatten, leaves, unknown_keys
from policies import routing

CONFIG_VARIABLE = "HOTPREFIX_CONFIG"
LEAVES = leaves(Gateway)
ALIASES = {"--host": "listen.host", "--port": "listen.port", "--worker-urls": "workers"}
"""Flags that people know from other routers, each with its key."""

SECRETS = ("workers[].api_key",)
"""Keys whose values are never shown."""

USERINFO = re.compile(r"(://)[^/@\s]+@")
HIDDEN = "***"


class SettingsError(UserError):
    """The configuration cannot be used. ``problems``: one line each, with its place; the text is all
    of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join(["the configuration cannot be used:", *self.problems]))


class Loaded(msgspec.Struct, frozen=True):
    """``origins`` says of every key where its value is from: ``default``, ``file PATH:LINE``, the
    variable or the flag. Parts of lists and maps that were written have an origin of their own
    (``workers[0].url``); parts that have none took their default."""

    config: Gateway
    origins: Mapping[str, str]


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    """The checked configuration that ``argv`` (flags only) and ``environ`` describe. Raises
    ``SettingsError`` with all that is wrong, not only the first."""
    path, flags, found = _config_file(argv, environ)
    stack = [
        layers.from_file(path, LEAVES) if path else Layer(),
        layers.from_environ(environ, LEAVES),
        layers.from_flags(flags, LEAVES, ALIASES),
    ]
    given: dict[str, Given] = {}
    for layer in stack:
        found += layer.problems
        given |= layer.given
    values, refused = _typed(given)
    found += refused.values()
    config = _assemble(values)
    for key, text in check_config(config):
        leaf = _leaf_of(key)
        if leaf not in refused:
            found.append(f"{_at(given.get(leaf), key)}: {key}: {text}")
    if found:
        raise SettingsError(found)
    return Loaded(config, _origins(given))


def _config_file(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, list[str], list[str]]:
    """The file's path or "", the other arguments, and problems."""
    path, rest, found = environ.get(CONFIG_VARIABLE, ""), [], []
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


def _typed(given: dict[str, Given]) -> tuple[dict[str, object], dict[str, str]]:
    """The values, as their types want them, and for keys whose value is not, the problem. Short forms
    in ``given`` are written out."""
    values: dict[str, object] = {}
    refused: dict[str, str] = {}
    for key, short in given.items():
        leaf = LEAVES[key]
        value = _SHORT[key](short.value) if key in _SHORT else short.value
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


def _is_text(value: object) -> bool:
    """Whether all strings in ``value`` can be encoded: an environment may hold bytes that are no UTF-8."""
    parts = [part for pair in flatten(value, "") for part in pair if isinstance(part, str)]
    return not any("\ud800" <= letter <= "\udfff" for part in parts for letter in part)


def _explain(key: str, error: str) -> tuple[str, str]:
    """msgspec's ``Expected `int`, got `str` - at `$[0].rank``` as a path and a sentence."""
    what, _, where = error.replace(" - at `key` in `$", " - at `$").partition(" - at `$")
    path = key + where.rstrip("`").replace("[...]", "")
    return path, what[:1].lower() + what[1:].replace("`", "")


def _assemble(values: Mapping[str, object]) -> Gateway:
    """The defaults with ``values`` in their places. Leaf by leaf, because a section's default may
    differ from its type's: ``admin`` has another port than any ``Listen``."""
    tree = msgspec.to_builtins(Gateway())
    for key, value in values.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch[section]
        branch[name] = value
    return msgspec.convert(tree, Gateway)


def _origins(given: Mapping[str, Given]) -> dict[str, str]:
    origins = dict.fromkeys(LEAVES, "default")
    for key, one in given.items():
        origins |= {path: one.place(path) for path, _ in flatten(one.value, key)}
        origins[key] = one.origin
    return origins


def _leaf_of(path: str) -> str:
    """The leaf that ``path`` lies in."""
    while path not in LEAVES:
        path = re.sub(r"(\.[^.\[]*|\[\d+\])$", "", path)
    return path


def _at(given: Given | None, path: str) -> str:
    """Where ``path`` was written, as a problem says it."""
    return given.place(path).removeprefix("file ") if given else "default"


def _short_workers(value: object) -> object:
    """URLs with commas between them, or a list with URLs in it, become workers w0, w1, …"""
    if isinstance(value, str):
        value = [url.strip() for url in value.split(",") if url.strip()]
    if not isinstance(value, list):
        return value
    return [
        {"name": f"w{number}", "url": one} if isinstance(one, str) else one
        for number, one in enumerate(value)
    ]


def _short_policy(value: object) -> object:
    """A bare name is a policy with its defaults. Other routers write names with underscores."""
    if not isinstance(value, str):
        return value
    hyphened = value.replace("_", "-")
    return {"name": hyphened if hyphened in routing.POLICIES else value}


_SHORT: Mapping[str, Callable[[object], object]] = {"workers": _short_workers, "policy": _short_policy}


def _leaf_help(leaf: Leaf) -> str:
    also = [flag for flag, key in ALIASES.items() if key == leaf.key]
    return f"  {', '.join([leaf.flag, *also]):<34} {leaf.variable}"


def usage() -> str:
    """All flags and variables, for ``--help``."""
    rows = "\n".join(map(_leaf_help, LEAVES.values()))
    return f"  {'--config FILE':<34} {CONFIG_VARIABLE}\n{rows}\n"


def show(argv: Sequence[str]) -> int:
    """``hotprefix config show``: every key with its value and origin, secrets hidden."""
    argv = list(argv)
    if "-h" in argv or "--help" in argv:
        print(f"usage: hotprefix config show [--json] [FLAGS]\n\n{usage()}", end="")
        return 0
    as_json = "--json" in argv
    loaded = load([word for word in argv if word != "--json"], os.environ)
    print(shown_json(loaded) if as_json else shown_table(loaded))
    return 0


def check(argv: Sequence[str]) -> int:
    """``hotprefix config check FILE``: says whether the file alone makes a configuration."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: hotprefix config check FILE", file=sys.stderr)
        return 0 if list(argv) in (["-h"], ["--help"]) else 2
    load(["--config", argv[0]], {})
    print(f"{argv[0]}: ok")
    return 0


def shown_json(loaded: Loaded) -> str:
    """``{"config": …, "origins": …}``, where ``config`` is fit to be a configuration file."""
    shown = {"config": _shown(loaded.config), "origins": dict(loaded.origins)}
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()


def shown_table(loaded: Loaded) -> str:
    """A line for every key: its path, its value as JSON, its origin."""
    rows = [
        (path, msgspec.json.encode(value).decode(), loaded.origins.get(path, "default"))
        for path, value in flatten(_shown(loaded.config), "")
    ]
    keys, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{key:<{keys}}  {value:<{min(values, 48)}}  {origin}" for key, value, origin in rows)


def _shown(config: Gateway) -> dict[str, object]:
    """The configuration as plain values, with the policy's defaults written out and secrets hidden."""
    tree = msgspec.to_builtins(config)
    tree["policy"] = {"name": config.policy["name"], **msgspec.to_builtins(routing.params(config.policy))}
    hidden: dict[str, object] = _hidden(tree, "")
    return hidden


def _hidden(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _hidden(item, f"{key}.{name}" if key else name) for name, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, f"{key}[]") for item in value]
    if value is not None and key in SECRETS:
        return HIDDEN
    return USERINFO.sub(rf"\g<1>{HIDDEN}@", value) if isinstance(value, str) else value
