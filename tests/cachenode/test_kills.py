"""Real processes that die, or are cut off and live on, in the middle of their copies; and nodes that are
replaced under live clients. What others stored stays byte for byte what it was."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from cachenode import wire
from cachenode.client import NodeClient
from tests.cachenode.nodes import BLOCK, Node, ask, attach, client, connect
from tests.cachenode.stores import Prompt, prompt

KILLS = 30
CUTS = 12

WRITER = """
import json, sys
from cachenode.attachment import Attachment
from tests.cachenode.stores import layout
joined = Attachment.join(sys.argv[1], layout(4096), "w", sys.argv[2])
assert joined is not None and joined.arena is not None
print("joined", flush=True)
passages = json.loads(sys.stdin.readline())
said = False
while True:
    for offset, length in passages:
        joined.arena[offset : offset + length] = 0xEE
    if not said:
        print("writing", flush=True)
        said = True
"""


class Writer:
    """A worker process that never stops writing into what it was granted."""

    def __init__(self, path: Path, session: str) -> None:
        root = Path(__file__).resolve().parents[2]
        self.child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), session],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        self.hear("joined")

    def hear(self, word: str) -> None:
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == f"{word}\n"

    def write(self, passages: list[tuple[int, int]]) -> None:
        """Returns when it has begun."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(passages) + "\n")
        self.child.stdin.flush()
        self.hear("writing")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.child.kill()
        self.child.communicate()


class Other:
    """Another engine, which stores prompts and finds each of their bytes again."""

    def __init__(self, node: Node) -> None:
        self.client = connect(client(node.path))
        self.worker = attach(self.client, node.path)
        self.held: list[Prompt] = []

    def store(self, text: Prompt) -> None:
        reply = ask(self.client, self.client.reserve(0, text.keys, text.proofs))
        assert isinstance(reply, wire.Reserved)
        assert self.worker.arena is not None
        for grant in reply.grants:
            at = 0
            data = b"".join(
                text.keys[16 * i : 16 * (i + 1)] * (BLOCK // 16)
                for i in range(grant.first, grant.first + grant.blocks)
            )
            for offset, length in grant.passages:
                self.worker.arena[offset : offset + length] = memoryview(data)[at : at + length]
                at += length
        self.client.commit([grant.reservation for grant in reply.grants])
        self.held.append(text)

    def check(self) -> None:
        """What can be read is what was written."""
        assert self.worker.arena is not None
        for text in self.held:
            reply = ask(self.client, self.client.lease(0, text.keys, text.proofs))
            assert isinstance(reply, wire.Leased)
            for piece in reply.pieces:
                data = b"".join(bytes(self.worker.arena[o : o + n]) for o, n in piece.passages)
                for number in range(piece.blocks):
                    block = data[BLOCK * (piece.start + number) : BLOCK * (piece.start + number + 1)]
                    first = piece.first + number
                    assert block == text.keys[16 * first : 16 * (first + 1)] * (BLOCK // 16)
                assert self.worker.valid(piece.slot, piece.generation)
            self.client.release([reply.lease])

    def close(self) -> None:
        self.worker.close()
        self.client.close()


def writing(node: Node, made: NodeClient, text: Prompt) -> Writer:
    """A process in the middle of its copies for this client."""
    writer = Writer(node.path, made.session)
    reply = ask(made, made.reserve(0, text.keys, text.proofs))
    assert isinstance(reply, wire.Reserved)
    writer.write([passage for grant in reply.grants for passage in grant.passages])
    return writer


def test_workers_killed_in_the_middle_of_a_copy(tmp_path: Path) -> None:
    rng = random.Random(5)
    with Node(tmp_path / "c.sock", blocks=48) as node:
        other = Other(node)
        for number in range(KILLS):
            made = connect(client(node.path))
            with writing(node, made, prompt(1000 + number, 8 + number % 8)):
                other.store(prompt(number, rng.randrange(4, 24), shared_blocks=3))
                other.check()
            node.eventually(lambda: node.room.store.figures().quarantined == 0)
            assert node.server.call(node.room.store.figures).reserved == 0
            other.check()
            node.check()
            made.close()
        other.close()


def test_live_clients_cut_off_in_the_middle_of_a_copy(tmp_path: Path) -> None:
    """The writer does not notice and goes on: into space that nobody else gets, until it exits."""
    with Node(tmp_path / "c.sock", blocks=48) as node:
        other = Other(node)
        for number in range(CUTS):
            made = connect(client(node.path))
            blocks = 8 + number % 8
            with writing(node, made, prompt(1000 + number, blocks)):
                made._lose()
                node.eventually(lambda: node.room.store.figures().quarantined > 0)
                assert node.server.call(node.room.store.figures).quarantined == blocks * BLOCK
                for seed in range(4):  # More than fits: all space but the quarantined is used and used again.
                    other.store(prompt(50 * number + seed, 20))
                other.check()
                node.check()
                assert node.server.call(node.room.store.figures).quarantined == blocks * BLOCK
            node.eventually(lambda: node.room.store.figures().quarantined == 0)
            made.close()
        other.close()


def test_nodes_replaced_under_live_clients(tmp_path: Path) -> None:
    """The old node's memory lives as long as somebody maps it, and is nobody's else."""
    path = tmp_path / "c.sock"
    made = client(path)
    writers: list[Writer] = []
    for boot in range(4):
        with Node(path, blocks=48, boot=f"boot-{boot}") as node:
            connect(made)
            assert made.boot == f"boot-{boot}"
            other = Other(node)
            writers.append(writing(node, made, prompt(1000 + boot, 10)))
            for seed in range(4):
                other.store(prompt(50 * boot + seed, 20))
            other.check()
            node.check()
            other.close()
        made.poll()
    for writer in writers:
        assert writer.child.poll() is None
        writer.__exit__(None, None, None)
    made.close()
