"""Conversations in natural English for benchmarks, the same for the same seed, and none alike.

The text is the Python language reference that every CPython ships; no two conversations, and no two
turns, use the same passage.
"""

import random
import re
from collections.abc import Iterator
from pydoc_data.topics import topics

import msgspec

CHARS_PER_TOKEN = 4.5
"""Of this text under SmolLM2's tokenizer, to size passages; what was sent is measured, not assumed."""


class Conversation(msgspec.Struct):
    """``document`` is the system message, ``questions`` the user's turns."""

    document: str
    questions: list[str]


def conversations(
    count: int, turns: int, *, document_tokens: int, turn_tokens: int, seed: int
) -> list[Conversation]:
    """``count`` conversations whose document has about ``document_tokens`` tokens and each of whose
    questions brings about ``turn_tokens``. Raises ValueError when there is not enough text."""
    passages = _passages(seed)
    made = []
    for number in range(count):
        document = _take(passages, document_tokens)
        questions = [
            f"{_take(passages, turn_tokens)} How does that bear on the text above?" for _ in range(turns)
        ]
        made.append(Conversation(f"Text {seed}-{number}. {document}", questions))
    return made


def shuffled(count: int, turn: int, seed: int) -> list[int]:
    """The order in which the conversations take this turn."""
    order = list(range(count))
    random.Random(f"{seed}/{turn}").shuffle(order)
    return order


def _passages(seed: int) -> Iterator[str]:
    names = sorted(topics)
    random.Random(seed).shuffle(names)
    for name in names:
        for paragraph in topics[name].split("\n\n"):
            words = re.sub(r"\s+", " ", paragraph).strip()
            if len(words) > 80 and sum(c.isalpha() or c == " " for c in words) > 0.85 * len(words):
                yield words


def _take(passages: Iterator[str], tokens: int) -> str:
    wanted = int(tokens * CHARS_PER_TOKEN)
    text = ""
    while len(text) < wanted:
        passage = next(passages, None)
        if passage is None:
            raise ValueError("not enough text for so many and such long conversations")
        text += passage + " "
    return text[:wanted].rsplit(" ", 1)[0]
