"""An engine's connector without an engine: stores and loads made-up prompts through the real client path.

One scheduler and one worker in one thread, as the benchmarks and the tests of a node need them.
"""

import hashlib
import secrets
import time
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from cacheindex.keys import KEY_BYTES
from cachenode.attachment import Attachment
from cachenode.client import NodeClient
from cachenode.record import PROOF_BYTES, Layout
from cachenode.wire import Leased, Piece, Reply, Reserved

Bytes = NDArray[np.uint8]

REPLY_S = 30.0


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as a node sees it: 16 bytes of key and 32 of proof a block."""

    keys: bytes
    proofs: bytes

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def part(self, first: int, end: int) -> "Prompt":
        """Blocks ``first`` to ``end``."""
        return Prompt(
            self.keys[first * KEY_BYTES : end * KEY_BYTES],
            self.proofs[first * PROOF_BYTES : end * PROOF_BYTES],
        )


def made_up(number: int, blocks: int) -> Prompt:
    """Prompt ``number``: the same bytes each time, no block like another prompt's."""
    stream = hashlib.shake_256(number.to_bytes(8, "big")).digest(blocks * (KEY_BYTES + PROOF_BYTES))
    return Prompt(stream[: blocks * KEY_BYTES], stream[blocks * KEY_BYTES :])


def plain_layout(block_bytes: int, block_tokens: int = 32) -> Layout:
    """A layout whose blocks have so many bytes."""
    return Layout(
        family="bench",
        model="bench",
        revision=str(block_bytes),
        memory="plain",
        dtype="uint8",
        layers=1,
        heads=1,
        head_size=1,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
    )


class Link(Protocol):
    """What the measurements need of a node."""

    def match(self, prompt: Prompt) -> int:
        """How many leading blocks are held."""

    def store(self, prompt: Prompt, first: int = 0, source: Bytes | None = None) -> int:
        """Keeps the blocks from ``first`` on and returns how many leading blocks of the prompt are held
        then; copies bytes of ``source``, which begin with that block, where given."""

    def load(self, prompt: Prompt, target: Bytes | None = None) -> int:
        """Reads the leading blocks that are held into ``target`` and returns how many; 0 when they were
        replaced meanwhile."""

    def ask(self, prompt: Prompt) -> int | None:
        """Asks for a lease on what is held and does not wait for it; None where nothing is held."""

    def read(self, ticket: int | None, target: Bytes | None = None) -> int:
        """Copies what was leased, checks that it was not replaced meanwhile, gives the lease back; returns
        the blocks that were read."""


class NodeLink:
    """A link to a real node. Waits for each reply; raises RuntimeError when the node does not answer."""

    def __init__(self, socket: str, layout: Layout, worker: str = "bench") -> None:
        self._chunk, self._block_bytes = layout.chunk_blocks, layout.block_bytes
        self._client = NodeClient(
            socket, layout, worker, lambda: secrets.token_hex(16), time.monotonic, mode="map"
        )
        self._asked: set[int] = set()
        self._early: dict[int, Reply] = {}
        """Replies that came while another was waited for."""
        self._connect()
        memory = Attachment.join(socket, layout, worker, self._client.session, rank=0, mode="map")
        if memory is None or memory.arena is None:
            raise RuntimeError("the node does not hand out its memory")
        self._memory, self._arena = memory, memory.arena

    def _connect(self) -> None:
        end = time.monotonic() + REPLY_S
        while not self._client.connected:
            if time.monotonic() > end:
                raise RuntimeError(f"the node does not take us: {self._client.refusal or 'no answer'}")
            self._client.poll()
            time.sleep(0.001)

    def match(self, prompt: Prompt) -> int:
        return self._client.match("", prompt.keys, prompt.proofs)

    def store(self, prompt: Prompt, first: int = 0, source: Bytes | None = None) -> int:
        skip = first % self._chunk
        start = first - skip
        wanted = prompt.part(start, prompt.blocks)
        parent = prompt.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else b""
        ticket = self._client.reserve(start, wanted.keys, wanted.proofs, "", parent, skip=skip)
        reply = self._wait(self._sent(ticket))
        if not isinstance(reply, Reserved):
            raise RuntimeError(f"no answer to a reservation: {reply}")
        if source is not None:
            for grant in reply.grants:
                self._write(grant.passages, source[(grant.first - first) * self._block_bytes :])
        if reply.grants:
            self._wait(self._sent(self._client.commit([grant.reservation for grant in reply.grants])))
        return first + reply.admitted

    def load(self, prompt: Prompt, target: Bytes | None = None) -> int:
        return self.read(self.ask(prompt), target)

    def ask(self, prompt: Prompt) -> int | None:
        if not self.match(prompt):
            return None
        return self._sent(self._client.lease(0, prompt.keys, prompt.proofs, ""))

    def read(self, ticket: int | None, target: Bytes | None = None) -> int:
        if ticket is None:
            return 0
        reply = self._wait(ticket)
        if not isinstance(reply, Leased):
            raise RuntimeError(f"no answer to a lease: {reply}")
        if target is not None:
            self._read(reply.pieces, target)
        sound = all(self._memory.valid(piece.slot, piece.generation) for piece in reply.pieces)
        if reply.lease:
            self._client.release([reply.lease])
        return reply.blocks if sound else 0

    def close(self) -> None:
        """Ends the session."""
        self._memory.close()
        self._client.close()

    def _write(self, passages: list[tuple[int, int]], source: Bytes) -> None:
        at = 0
        for offset, length in passages:
            self._arena[offset : offset + length] = source[at : at + length]
            at += length

    def _read(self, pieces: list[Piece], target: Bytes) -> None:
        """Whole records only: nothing here asks for a part of one. Neighbours in memory are one copy."""
        at = 0
        for offset, length in joined(pieces):
            target[at : at + length] = self._arena[offset : offset + length]
            at += length

    def _sent(self, ticket: int | None) -> int:
        if ticket is None:
            raise RuntimeError("the node is gone")
        self._asked.add(ticket)
        return ticket

    def _wait(self, ticket: int) -> Reply:
        """The reply; those to releases are dropped, nobody waits for them."""
        reply = self._early.pop(ticket, None) or self._client.wait(ticket, REPLY_S)
        if reply is None:
            raise RuntimeError(f"the node did not answer within {REPLY_S:.0f} s")
        self._asked.discard(ticket)
        for early in self._client.poll():
            if early.id in self._asked:
                self._early[early.id] = early
        return reply


def joined(pieces: list[Piece]) -> list[tuple[int, int]]:
    """The passages of whole records, those that touch made one."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        for offset, length in piece.passages:
            if runs and sum(runs[-1]) == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((offset, length))
    return runs
