"""What a gateway and a node can be told, and the commands that show and check it."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cachenode.config_check
import gateway.config_check
from cachenode.config import Node
from gateway.config import Gateway
from hotprefix.merge import HIDDEN, Loaded, Process, SettingsError
from policies import eviction, routing

__all__ = ["GATEWAY", "HIDDEN", "NODE", "Loaded", "SettingsError", "check", "load", "show"]


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


def _short_eviction(value: object) -> object:
    """A bare name is a policy with its defaults."""
    return {"name": value.replace("_", "-")} if isinstance(value, str) else value


GATEWAY: Process[Gateway] = Process(
    Gateway,
    gateway.config_check.problems,
    config_variable="HOTPREFIX_CONFIG",
    policy=("policy", routing.params),
    aliases={"--host": "listen.host", "--port": "listen.port", "--worker-urls": "workers"},
    secrets=("workers[].api_key",),
    short={"workers": _short_workers, "policy": _short_policy},
)
NODE: Process[Node] = Process(
    Node,
    cachenode.config_check.problems,
    config_variable="HOTPREFIX_NODE_CONFIG",
    variables="HOTPREFIX_NODE_",
    policy=("eviction", eviction.params),
    short={"eviction": _short_eviction},
)


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded[Gateway]:
    """A gateway's configuration. Raises ``SettingsError``."""
    return GATEWAY.load(argv, environ)


def show(argv: Sequence[str]) -> int:
    """``hotprefix config show``: every key with its value and origin, secrets hidden."""
    of, rest = _which(argv)
    if "-h" in rest or "--help" in rest:
        print(f"usage: hotprefix config show [--node] [--json] [FLAGS]\n\n{of.usage()}", end="")
        return 0
    as_json = "--json" in rest
    loaded = of.load([word for word in rest if word != "--json"], os.environ)
    print(of.shown_json(loaded) if as_json else of.shown_table(loaded))
    return 0


def check(argv: Sequence[str]) -> int:
    """``hotprefix config check FILE``: says whether the file alone makes a configuration."""
    of, rest = _which(argv)
    if len(rest) != 1 or rest[0].startswith("-"):
        print("usage: hotprefix config check [--node] FILE", file=sys.stderr)
        return 0 if rest in (["-h"], ["--help"]) else 2
    of.load(["--config", rest[0]], {})
    print(f"{rest[0]}: ok")
    return 0


def _which(argv: Sequence[str]) -> tuple[Process[Any], list[str]]:
    """The process that is meant, and the other arguments."""
    rest = [word for word in argv if word != "--node"]
    return (NODE if len(rest) < len(argv) else GATEWAY), rest
