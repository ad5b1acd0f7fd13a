"""The command table. A command's module is loaded when it is used, so ``--help`` stays quick.

Exit status: 0 done · 1 failed, the output says how (a part died, a benchmark's claim does not hold) ·
2 a mistake in what was asked, one line says which · 3 a real engine cannot be had on this machine ·
130 interrupted.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hotprefix.errors import CommandError, UserError

Run = Callable[[Sequence[str]], int]


class Command(NamedTuple):
    """``target`` is ``module:function``; the function takes the arguments that follow the command's
    name and returns the exit status."""

    target: str
    help: str


COMMANDS = {
    "up": Command("hotprefix.up:main", "start engines and a gateway on this machine, stop them on Ctrl-C"),
    "gateway": Command("hotprefix.run_gateway:main", "start a gateway before engines that already run"),
    "node": Command("hotprefix.run_node:main", "start this machine's cache node"),
    "config show": Command(
        "hotprefix.settings:show", "print the merged configuration and where each value is from"
    ),
    "config check": Command("hotprefix.settings:check", "check the configuration, start nothing"),
    "keys new": Command("hotprefix.commands:make_key", "make an API key for a tenant"),
    "sim": Command("loadtest.simengine:main", "start a simulated engine"),
    "setup": Command("hotprefix.commands:setup", "set up the real engine and its model, start nothing"),
    "peers lmcache": Command("loadtest.peers:main", "set up LMCache, which benchmarks compare with"),
    "bench gateway": Command("loadtest.bench_gateway:main", "measure the gateway against simulated engines"),
    "bench engines": Command("loadtest.bench_engines:main", "measure routing, or the node, on real engines"),
    "bench node": Command("loadtest.bench_node:main", "measure a cache node without engines"),
    "version": Command("hotprefix.commands:version", "print the version"),
}


def usage() -> str:
    """The help text, made from the table and from this file's first lines."""
    rows = "\n".join(f"  {name:<14} {command.help}" for name, command in COMMANDS.items())
    statuses = (__doc__ or "").split("\n\n")[1].strip()
    return (
        f"usage: hotprefix COMMAND [OPTIONS]\n\n{rows}\n\nhotprefix COMMAND --help says more.\n\n{statuses}"
    )


def find(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command that ``arguments`` begin with, and the rest. Raises UserError."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    first = arguments[0]
    family = [name for name in COMMANDS if name.split()[0] == first]
    if family:
        raise UserError(f"hotprefix {first} needs one of: {', '.join(name.split()[1] for name in family)}")
    near = difflib.get_close_matches(first, COMMANDS, n=1)
    hint = f", did you mean {near[0]}?" if near else "; hotprefix --help lists them"
    raise UserError(f"there is no command {first}{hint}")


def load(target: str) -> Run:
    """The function that ``module:function`` names."""
    module, _, function = target.partition(":")
    run: Run = getattr(importlib.import_module(module), function)
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the ``hotprefix`` command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0
    if given[0] == "--version":
        given[0] = "version"
    try:
        name, rest = find(given)
        return load(COMMANDS[name].target)(rest)
    except CommandError as error:
        print(f"hotprefix: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
