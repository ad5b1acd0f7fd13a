"""The small commands. Each takes its arguments and returns the exit status."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

import msgspec

from gateway.tenants import new_key
from hotprefix.engine_env import ensure_engine
from hotprefix.home import find_home
from hotprefix.model import DEFAULT_MODEL, ensure_model
from hotprefix.progress import say_error


def version(arguments: Sequence[str]) -> int:
    """Prints the version."""
    argparse.ArgumentParser(prog="hotprefix version", description="Print the version.").parse_args(arguments)
    print(importlib.metadata.version("hotprefix"))
    return 0


def setup(arguments: Sequence[str]) -> int:
    """Makes the engine's environment and the default model; nothing is done twice."""
    parser = argparse.ArgumentParser(
        prog="hotprefix setup", description="Set up vLLM for CPU (about 2.5 GB) and SmolLM2; start nothing."
    )
    parser.parse_args(arguments)
    home = find_home()
    ensure_engine(home, say_error)
    ensure_model(home, DEFAULT_MODEL, say_error)
    return 0


def make_key(arguments: Sequence[str]) -> int:
    """Prints the key on standard output, the entry for the keys file on standard error."""
    parser = argparse.ArgumentParser(
        prog="hotprefix keys new",
        description="Make an API key. The key goes to standard output, once; the entry for the keys file, "
        "which holds only its digest, goes to standard error.",
    )
    parser.add_argument("tenant", metavar="TENANT", help="whose key it is")
    parser.add_argument("--admin", action="store_true", help="may use the admin listener and steer KV")
    options = parser.parse_args(arguments)
    if not options.tenant.strip():
        parser.error("a tenant needs a name")
    key, entry = new_key(options.tenant, admin=options.admin)
    print(f"# add under `keys:` in the keys file\n- {msgspec.json.encode(entry).decode()}", file=sys.stderr)
    print(key)
    return 0
