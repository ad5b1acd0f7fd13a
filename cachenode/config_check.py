"""What a node's configuration must be beyond its types, in one place. Pure: opens no file."""

import re
from collections.abc import Iterator

from cachenode.config import Node, endpoints_of, socket_of
from cachenode.publisher import check_address, is_loopback
from cachenode.unix_path import MAX_PATH_BYTES
from policies import eviction

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
LEAST_BYTES = 1024 * 1024

Problem = tuple[str, str]
"""A dotted key and what is wrong with it, with what to do about it."""


def problems(config: Node) -> list[Problem]:
    """Everything that would keep a node from starting, or from being safe, with this configuration."""
    return [*_plain(config), *_events(config), *_admin(config), *_eviction(config)]


def _plain(config: Node) -> Iterator[Problem]:
    if config.name and not NAME.fullmatch(config.name):
        yield "name", f"{config.name!r} is no name: letters, digits and . _ : -, at most 128"
    if len(f"{socket_of(config)}.events".encode()) > MAX_PATH_BYTES:
        yield "socket", f"is longer than {MAX_PATH_BYTES} bytes; choose a shorter path"
    if not LEAST_BYTES <= config.memory.bytes < 2**48:
        yield "memory.bytes", f"is {config.memory.bytes}; give at least {LEAST_BYTES}, in bytes"
    if not 0 <= config.memory.records <= 100_000_000:
        yield "memory.records", f"is {config.memory.records}; give a number up to 100000000, or 0"


def _events(config: Node) -> Iterator[Problem]:
    for key, address in zip(("endpoint", "replay"), endpoints_of(config), strict=True):
        try:
            check_address(address, remote=config.events.allow_remote)
        except ValueError as error:
            yield f"events.{key}", str(error)
    if len(set(endpoints_of(config))) < 2:
        yield "events.replay", "is the address of events.endpoint too; give it another"


def _admin(config: Node) -> Iterator[Problem]:
    if not 0 <= config.admin.port <= 65_535:
        yield "admin.port", f"is {config.admin.port}; ports go from 0 to 65535"
    if not config.admin.host:
        yield "admin.host", "is empty; give 127.0.0.1, or 0.0.0.0 for all interfaces"
    elif not is_loopback(config.admin.host) and config.keys_file is None:
        yield (
            "admin.host",
            f"{config.admin.host} can be reached from other machines; set keys_file (`hotprefix keys new "
            "NAME --admin` makes a key), or listen on 127.0.0.1",
        )


def _eviction(config: Node) -> Iterator[Problem]:
    try:
        eviction.params(config.eviction)
    except eviction.BadPolicy as error:
        yield f"eviction.{error.parameter}", str(error)
