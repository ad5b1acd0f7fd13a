"""Pairs of prompts that nearly are the same: equal leading tokens, and one thing that must keep them apart.

Shared by the tests that ask whether two of them ever meet; everything comes from a seed.
"""

import hashlib
import random
from typing import NamedTuple

import msgspec

from cachenode.connectors.naming import Asked, Namer, Names
from cachenode.record import PROOF_BYTES, Layout, moved, realm

KEY_BYTES = 16
BLOCK_BYTES = 160
"""Of every block here; large enough to tell whose it is."""

SECRETS = (b"the first secret", b"the second secret")
KINDS = ("text", "salt", "secret", "adapter", "digest", "item", "item_offset", "layout", "model")
LAYOUT_CHANGES: tuple[dict[str, str | int], ...] = (
    {"family": "transformers"},
    {"revision": "another"},
    {"memory": "another order"},
    {"dtype": "float16"},
    {"heads": 6, "head_size": 32},
    {"layers": 60, "block_bytes": 2 * BLOCK_BYTES},
    {"block_bytes": 2 * BLOCK_BYTES},
    {"ranks": 2},
)


class Named(NamedTuple):
    """What is asked of a node: blocks from a prompt's start on. Forged ones too."""

    layout: Layout
    adapter: str
    keys: bytes
    proofs: bytes

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def places(self) -> bytes:
        return moved(self.keys, realm(self.layout.fingerprint(), self.adapter))

    def stamp(self, number: int) -> bytes:
        """The bytes of a block of one rank: nobody else's, as far as names can tell."""
        key = self.keys[KEY_BYTES * number : KEY_BYTES * (number + 1)]
        proof = self.proofs[PROOF_BYTES * number : PROOF_BYTES * (number + 1)]
        said = f"{self.layout.fingerprint()} {self.adapter} ".encode() + key + proof
        return hashlib.shake_128(said).digest(self.layout.block_bytes)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a prompt's names may depend on."""

    tokens: tuple[int, ...]
    layout: Layout
    asked: Asked = Asked()
    secret: bytes = SECRETS[0]

    def names(self) -> Names:
        found = Namer(self.layout.model, self.layout.block_tokens, self.secret).names(self.asked)
        assert isinstance(found, Names), found
        found.extend(self.tokens)
        return found

    def named(self) -> Named:
        names = self.names()
        return Named(self.layout, names.adapter, names.keys(0, names.blocks), names.proofs(0, names.blocks))

    def places(self) -> list[bytes]:
        return split(self.named().places(), KEY_BYTES)

    def proofs(self) -> list[bytes]:
        return split(self.named().proofs, PROOF_BYTES)


def split(packed: bytes, size: int) -> list[bytes]:
    return [packed[i : i + size] for i in range(0, len(packed), size)]


def layout(**changes: str | int) -> Layout:
    fields: dict[str, str | int] = {
        "family": "vllm",
        "model": "a model",
        "revision": "1",
        "memory": "kv",
        "dtype": "bfloat16",
        "layers": 30,
        "heads": 3,
        "head_size": 64,
        "block_tokens": 32,
        "block_bytes": BLOCK_BYTES,
    }
    return msgspec.convert(fields | changes, Layout)


def pair(seed: int, kind: str) -> tuple[Prompt, Prompt, int]:
    """Two prompts that differ in ``kind`` alone, and the first block that may tell them apart."""
    chance = random.Random(f"{kind} {seed}")
    first = plain(chance)
    size, blocks = first.layout.block_tokens, len(first.tokens) // first.layout.block_tokens
    at = chance.randrange(blocks * size)
    changed = msgspec.structs.replace
    asked = first.asked
    match kind:
        case "text":
            tokens = list(first.tokens)
            tokens[at] ^= 1 << chance.randrange(16)
            return first, changed(first, tokens=tuple(tokens)), at // size
        case "salt":
            other = changed(asked, salt=chance.choice([asked.salt + "x", "y", "Y"]))
            return first, changed(first, asked=other), 0
        case "secret":
            salted = changed(first, asked=changed(asked, salt="a tenant's"))
            return salted, changed(salted, secret=SECRETS[1]), 0
        case "adapter":
            one = changed(first, asked=changed(asked, adapter="one", adapter_digest="d" * 64))
            return one, changed(one, asked=changed(one.asked, adapter="other")), 0
        case "digest":
            one = changed(first, asked=changed(asked, adapter="one", adapter_digest="d" * 64))
            return one, changed(one, asked=changed(one.asked, adapter_digest="e" * 64)), 0
        case "item":
            one, other = (
                changed(first, asked=changed(asked, items=((name, at),))) for name in ("one", "two")
            )
            return one, other, at // size
        case "item_offset":
            later = chance.randrange(at, blocks * size)
            one = changed(first, asked=changed(asked, items=(("one", at),)))
            two = changed(first, asked=changed(asked, items=(("one", later + 1),)))
            return one, two, at // size
        case "layout":
            other = layout(**chance.choice(LAYOUT_CHANGES))
            return first, changed(first, layout=other), 0
        case _:
            return first, changed(first, layout=layout(model="another model")), 0


def plain(chance: random.Random) -> Prompt:
    """A prompt of 1 to 24 blocks and a bit, of ordinary or of few tokens after a rare first one, sometimes salted or adapted."""
    words = chance.choice([range(65_536), range(3), [0]])
    length = 32 * chance.randint(1, 24) + chance.randrange(32)
    tokens = (chance.randrange(1 << 31), *chance.choices(words, k=length - 1))
    adapter = chance.choice(["", "", "some adapter"])
    asked = Asked(
        salt=chance.choice(["", "", "x", "some salt"]),
        adapter=adapter,
        adapter_digest="a" * 64 if adapter else "",
    )
    return Prompt(tokens=tokens, layout=layout(), asked=asked)


def forged(seed: int) -> tuple[Named, Named, int]:
    """A prompt, and one of another text that claims the same keys; and from which block on it does."""
    chance = random.Random(f"forged {seed}")
    true = plain(chance)
    blocks = len(true.tokens) // true.layout.block_tokens
    first = chance.choice([0, chance.randrange(blocks)])
    tokens = list(true.tokens)
    tokens[first * true.layout.block_tokens] += 1
    mine, other = true.named(), msgspec.structs.replace(true, tokens=tuple(tokens)).named()
    return mine, Named(mine.layout, mine.adapter, mine.keys, other.proofs), first
