"""From a request to its prompts' tokens, off the event loop and within a deadline.

Exact where it can be: the ids are those the engine will compute. Where it cannot, the prompt is
routed by its text, and says why. Nothing a request holds makes this raise or block.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from xxhash import xxh3_64_hexdigest

from cacheindex.keys import text_tokens
from gateway import config
from gateway.conversation import NotExactError
from gateway.openai import AnyRequest, ChatRequest, CompletionRequest, Endpoint
from gateway.pool import Done, Missed, Pool
from gateway.segments import Memory
from gateway.templates import OverBudgetError
from gateway.tokenizer import Length, Rendering, Tokenizer, cut
from gateway.tokenizer import load as load_tokenizer

T = TypeVar("T")
Loader = Callable[[str, Rendering, Callable[[], float], Memory], Tokenizer]

BYTES_PER_SECOND = 1_000_000
"""What one thread surely encodes (HF tokenizers on one slow core: 1.5 to 3 million bytes of prose, CJK,
zalgo or one letter, 10 million of special tokens). A text that would not be ready within the
deadline at this speed is not begun, because encoding cannot be stopped."""

TEXT_BYTES = 262_144
"""How much of a text gets keys: more would cost the loop time and tell replicas apart no better."""

LOAD_S = 300.0


class Prompt(msgspec.Struct, frozen=True):
    """One prompt. ``tokens``: ids, or pieces of text (``cacheindex.keys.text_tokens``), or nothing.
    ``count``: its length in tokens, estimated for text. ``reason``: why it is not exact, one of
    a few fixed words (fit for a metric's label), "" when it is:

    no_tokenizer, no_template, bad_template, renderer (the engine builds prompts in code) · own_template,
    media, suffix, prompt_embeds, token_ids (not numbers that fit) · too_long, busy, late,
    template_budget (ours to bound) · failed, messages, tools, tool_calls, continue_final_message,
    chat_template_kwargs, truncation (the engine will most likely refuse it)."""

    tokens: Sequence[int]
    kind: Literal["tokens", "text", "none"]
    count: int
    reason: str = ""


class Ask(msgspec.Struct, frozen=True):
    """What bounds one request: the model's length, bytes of text, and whose memory it uses."""

    room: int | None
    limit: int
    scope: bytes


class Tokenizers:
    """The tokenizers of all models, and the threads they run in. One event loop uses it."""

    def __init__(
        self,
        settings: config.Tokens,
        *,
        loader: Loader = load_tokenizer,
        clock: Callable[[], float] = time.monotonic,
        memory_bytes: int = 64_000_000,
    ) -> None:
        self._settings, self._loader, self._clock = settings, loader, clock
        self._ready: dict[str, Tokenizer] = {}
        self._failed: dict[str, str] = {}
        self._memory = Memory(memory_bytes)
        self._limit = int(settings.deadline_s * BYTES_PER_SECOND)
        threads = settings.threads
        self._pool = Pool("tokens", threads=threads, pending=settings.pending, spare=threads)
        self._loading = Pool("tokens-load", threads=1, pending=64, spare=1)
        self.counts: Counter[str] = Counter()
        """Prompts by reason; "" counts the exact ones."""

    @property
    def waiting(self) -> int:
        """Requests waiting for a thread."""
        return self._pool.waiting

    @property
    def lost_threads(self) -> int:
        """Threads held by work that outlived its deadline."""
        return self._pool.lost

    def known(self, model: str) -> bool:
        """Whether prompts of this base model can be exact."""
        return model in self._ready

    def settled(self, model: str) -> bool:
        """Whether loading this base model's tokenizer has ended, well or not."""
        return model in self._ready or model in self._failed

    def why_not(self, model: str) -> str:
        """For people: why a model's tokenizer is not there."""
        return "" if model in self._ready else self._failed.get(model, "never loaded")

    async def load(self, model: str, root: str | None, rendering: Rendering | None = None) -> None:
        """Load ``model``'s tokenizer from where the configuration says, else from ``root``. Never
        raises: what went wrong is in ``why_not``. Loading again replaces it if it succeeds."""
        where = self._settings.tokenizers.get(model, root)
        if where is None:
            self._failed[model] = "nobody said where its tokenizer is"
            return
        how = rendering if rendering is not None else Rendering()
        outcome = await self._loading.run(lambda: self._loader(where, how, self._clock, self._memory), LOAD_S)
        if isinstance(outcome, Done):
            self._ready[model] = outcome.value
            self._failed.pop(model, None)
        else:
            self._failed[model] = f"loading {where}: {outcome.why} {outcome.error}".rstrip()

    async def prompts(
        self,
        endpoint: Endpoint,
        model: str,
        request: AnyRequest,
        max_model_len: int | None,
        tenant: str = "",
    ) -> list[Prompt]:
        """The request's prompts, in order: one, or one per entry of a completion's list. What is
        remembered of it makes no other tenant's requests faster."""
        ask = Ask(max_model_len, self._limit, tenant.encode("utf-8", "surrogatepass"))
        if isinstance(request, ChatRequest):
            made = [await self._chat(model, request, ask)]
        else:
            made = await self._completion(model, request, ask)
        self.counts.update(prompt.reason for prompt in made)
        return made

    def close(self) -> None:
        """Let the threads go. ``prompts`` still answers, by text."""
        self._pool.close()
        self._loading.close()

    async def _chat(self, model: str, request: ChatRequest, ask: Ask) -> Prompt:
        tokenizer = self._ready.get(model)
        if request.chat_template is not None:
            return _chat_text(request, "own_template")
        if tokenizer is None:
            return _chat_text(request, "no_tokenizer")
        until = self._clock() + self._settings.deadline_s
        found = await self._run(lambda: _chat(tokenizer, request, ask, until))
        return _chat_text(request, found) if isinstance(found, str) else found

    async def _completion(self, model: str, request: CompletionRequest, ask: Ask) -> list[Prompt]:
        tokenizer = self._ready.get(model)
        entries = _entries(request.prompt)
        found: list[Prompt] | str
        if not any(isinstance(entry, str) for entry in entries):
            found = _guarded(lambda: _texts(tokenizer, entries, request, ask))
        elif tokenizer is None:
            found = "no_tokenizer"
        elif request.suffix is not None:
            found = "suffix"
        else:
            found = await self._run(lambda: _texts(tokenizer, entries, request, ask))
        if isinstance(found, str):
            found = [_inexact(entry, found, request, ask) for entry in entries]
        return [_none("prompt_embeds")] * _embedded(request.prompt_embeds) + found

    async def _run(self, work: Callable[[], T]) -> T | str:
        """What ``work`` gives in a thread, or the reason why it gave nothing."""
        deadline = self._settings.deadline_s
        outcome: Done[T | str] | Missed = await self._pool.run(lambda: _guarded(work), deadline)
        return outcome.value if isinstance(outcome, Done) else outcome.why


def _guarded(work: Callable[[], T]) -> T | str:
    try:
        return work()
    except NotExactError as error:
        return error.reason
    except OverBudgetError:
        return "template_budget"


def _chat(tokenizer: Tokenizer, request: ChatRequest, ask: Ask, until: float) -> Prompt:
    answer = request.max_completion_tokens
    length = _length(request, ask.room, request.max_tokens if answer is None else answer)
    text = tokenizer.text(request, until=until, limit=ask.limit)
    _weigh([text], ask.limit)
    special = bool(request.add_special_tokens)
    return _exact(tokenizer.ids(text, special=special, length=length, scope=ask.scope))


def _texts(
    tokenizer: Tokenizer | None, entries: list[Any], request: CompletionRequest, ask: Ask
) -> list[Prompt]:
    """A completion's prompts; ``tokenizer`` may be absent where none of them is text."""
    _weigh((entry for entry in entries if isinstance(entry, str)), ask.limit)
    length = _length(request, ask.room, _answer(request))
    special = request.add_special_tokens is not False
    return [
        _exact(tokenizer.ids(entry, special=special, length=length, scope=ask.scope))
        if isinstance(entry, str) and tokenizer is not None
        else _given(entry, length)
        for entry in entries
    ]


def _weigh(texts: Iterable[str], limit: int) -> None:
    size = sum(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts)
    if size > limit:
        raise NotExactError("too_long")


def _answer(request: CompletionRequest) -> int:
    """How long an answer may be: 16 where the request says null or nothing."""
    return 16 if request.max_tokens is None else request.max_tokens


def _length(request: AnyRequest, room: int | None, answer: int | None) -> Length:
    """``truncate_prompt_tokens`` as a number of tokens: -1 stands for what the model holds, less
    one token for an answer where a length was asked for."""
    keep, side = request.truncate_prompt_tokens, request.truncation_side
    if keep is not None and (keep < -1 or (keep < 0 and room is None)):
        raise NotExactError("truncation")
    if keep == -1 and room is not None:
        keep = max(0, room - 1) if answer else room
    if side not in (None, "left", "right"):
        raise NotExactError("truncation")
    return Length(keep, "left" if side == "left" else "right" if side == "right" else None, room)


def _entries(prompt: Any) -> list[Any]:
    """A completion's prompts, each a string or a list of ids."""
    if prompt is None:
        return []
    if isinstance(prompt, str) or (prompt and all(isinstance(entry, int) for entry in prompt)):
        return [prompt]
    return list(prompt)


def _exact(ids: "array[int]") -> Prompt:
    return Prompt(ids, "tokens", len(ids))


def _none(reason: str) -> Prompt:
    return Prompt((), "none", 0, reason)


def _given(entry: Any, length: Length) -> Prompt:
    """Ids that the client brings are used as they are."""
    if not isinstance(entry, list):
        return _none("token_ids")
    try:
        return _exact(cut(array("I", entry), length))
    except (OverflowError, TypeError):  # something that is no number from 0 to 2**32 - 1
        return _none("token_ids")


def _inexact(entry: Any, reason: str, request: CompletionRequest, ask: Ask) -> Prompt:
    if isinstance(entry, str):
        return _text(entry, reason)
    try:
        return _given(entry, _length(request, ask.room, _answer(request)))
    except NotExactError as error:
        return _none(error.reason)


def _embedded(embeds: Any) -> int:
    return len(embeds) if isinstance(embeds, list) else int(embeds is not None)


def _text(text: str, reason: str) -> Prompt:
    count = len(text) // 4
    tokens = text_tokens(text[:TEXT_BYTES])
    return Prompt(tokens[: TEXT_BYTES // 4], "text", count, reason)


def _chat_text(request: ChatRequest, reason: str) -> Prompt:
    return _text("\x1e".join(_flat(request)), reason)


def _flat(request: ChatRequest) -> list[str]:
    """A chat as text that only grows at its end when the conversation does: what a template prints
    first comes first, and large things (media) are named by their digest."""
    head = [request.chat_template, request.tools, request.documents]
    pieces = [_name(part) for part in head if part]
    size = sum(map(len, pieces))
    for message in request.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        calls = [message[field] for field in ("tool_calls", "reasoning") if message.get(field)]
        for part in (message.get("role"), *parts, *calls):
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                text = _name(part) if size < TEXT_BYTES else ""  # beyond it nothing gets a key
            pieces.append(text)
            size += len(text)
    return pieces


def _name(value: Any) -> str:
    """A value's JSON, or the digest of that where it is long."""
    try:
        data = msgspec.json.encode(value)
    except (RecursionError, UnicodeEncodeError):  # too deep, or half a surrogate pair
        return "?"
    return data.decode() if len(data) <= 4096 else xxh3_64_hexdigest(data)
