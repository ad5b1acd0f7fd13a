"""A model's tokenizer and templates, loaded once: from a request to the ids its engine will compute.

Everything here blocks, and runs in a thread of ``gateway.tokens``. Encoding lets go of the interpreter
lock: only the batch call of ``tokenizers`` does (1 MB of text held the loop for 1.1 s through the
plain call and for 5 ms through this one).
"""

import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jinja2
import msgspec

from gateway.conversation import NotExactError, conversation, tool_schemas, without_developer
from gateway.openai import ChatRequest
from gateway.segments import Added, Memory, Segments, numbers, stands_alone
from gateway.templates import Template

Side = Literal["left", "right"]

_OWN_RENDERER = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling"})
"""Model types for which engines do not render a template but build the prompt in code."""

_UNSET = (None, "auto")  # template arguments with these values are as good as absent


class Rendering(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model's engines were told to render, where not by default. vLLM's flags of the same
    meaning: ``--chat-template`` (a path or the text itself), ``--chat-template-content-format``,
    ``--default-chat-template-kwargs``, ``--exclude-tools-when-tool-choice-none``."""

    chat_template: str | None = None
    content_format: Literal["auto", "string", "openai"] = "auto"
    template_kwargs: dict[str, Any] = {}
    exclude_tools_when_none: bool = False


_KEPT: Side = "left"
"""Which side vLLM cuts from where a request does not say, whatever the tokenizer's own settings are
(``left`` loses the beginning, as everywhere in this file)."""


class Length(msgspec.Struct, frozen=True):
    """How a prompt is cut: to ``keep`` tokens (None: not at all), from ``side`` (None: as the
    engine does), in a model of ``room`` tokens (None: not known)."""

    keep: int | None = None
    side: Side | None = None
    room: int | None = None


class Backend(Protocol):
    """What we use of ``tokenizers.Tokenizer``."""

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool) -> Sequence[Any]: ...
    def num_special_tokens_to_add(self, is_pair: bool) -> int: ...
    def post_process(self, encoding: Any, *, add_special_tokens: bool) -> Any: ...


class Templates(msgspec.Struct, frozen=True):
    """The template for requests without and with tools; ``why`` says why there is none."""

    plain: Template | None
    tools: Template | None
    why: str = ""


class Tokenizer:
    """Immutable once made; every method may be called from several threads at once."""

    def __init__(
        self,
        backend: Backend,
        templates: Templates,
        *,
        special: Mapping[str, str],
        longest: int,
        segments: Segments,
        rendering: Rendering | None = None,
    ) -> None:
        """``special``: named tokens (``bos_token`` …). ``longest``: characters of the longest token."""
        self._backend, self._templates, self._segments = backend, templates, segments
        self._special, self._longest = dict(special), longest
        self._rendering = rendering if rendering is not None else Rendering()

    def text(self, request: ChatRequest, *, until: float, limit: int) -> str:
        """The request's prompt as text. Raises NotExactError, OverBudgetError, or what the
        template raises."""
        given = self._variables(request)
        template = self._templates.plain if given.get("tools") is None else self._templates.tools
        if template is None:
            raise NotExactError(self._templates.why)
        form = self._rendering.content_format
        messages = conversation(request.messages, template.format if form == "auto" else form)
        if not template.knows_developer:
            messages = without_developer(messages)
        return template.render(messages, given, self._special, until=until, limit=limit)

    def ids(self, text: str, *, special: bool, length: Length, scope: bytes = b"") -> "array[int]":
        """The ids of ``text``, with the tokenizer's own first and last tokens if ``special``.
        Pieces are remembered within ``scope``.

        Raises NotExactError for a text that is too long for the model.
        """
        room = None if length.room is None else length.room * self._longest
        if room is not None and len(text) > room:
            if length.keep is None:
                raise NotExactError("too_long")
            if length.side is not None:  # the engine cuts characters first, then tokens
                text = text[-room:] if length.side == "left" else text[:room]
        if length.keep is not None and length.side is None:
            return self._cut_early(text, special, length.keep)
        most = length.room if length.keep is None else None
        if not special:
            return cut(self._segments.encode(text, scope, most), length)
        return cut(numbers(self._encode(text, True), most), length)

    def _cut_early(self, text: str, special: bool, keep: int) -> "array[int]":
        """Cut to ``keep`` tokens before the tokenizer adds its own, which stay."""
        added = self._backend.num_special_tokens_to_add(False) if special else 0
        if keep < added:
            return cut(numbers(self._encode(text, special), None), Length(keep))
        encoding = self._encode(text, False)
        encoding.truncate(keep - added, direction=_KEPT)
        return numbers(self._backend.post_process(encoding, add_special_tokens=special), None)

    def _encode(self, text: str, special: bool) -> Any:
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0]

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        """What the template is given, weakest first: the engine's defaults and the tools, the
        client's ``chat_template_kwargs``, the request's own fields."""
        client = request.chat_template_kwargs or {}
        own: dict[str, Any] = {
            "add_generation_prompt": request.add_generation_prompt is not False,
            "continue_final_message": bool(request.continue_final_message),
            "documents": request.documents,
            "reasoning_effort": request.reasoning_effort,
        }
        if request.reasoning_effort is not None and "enable_thinking" not in client:
            own["enable_thinking"] = request.reasoning_effort != "none"
        excluded = self._rendering.exclude_tools_when_none and request.tool_choice == "none"
        tools = None if excluded else tool_schemas(request.tools)
        return _over(_over(self._rendering.template_kwargs, {"tools": tools}), _over(client, own))


def cut(ids: "array[int]", length: Length) -> "array[int]":
    """``ids`` cut as asked."""
    if length.keep is None or length.keep >= len(ids):
        return ids
    if length.keep == 0:
        return ids[:0]
    return ids[-length.keep :] if (length.side or _KEPT) == "left" else ids[: length.keep]


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    return {**below, **{name: value for name, value in above.items() if value not in _UNSET}}


class UnusableError(Exception):
    """A tokenizer that cannot give what its engine computes; the text says why, for people."""


def load(root: str, rendering: Rendering, clock: Callable[[], float], memory: Memory) -> Tokenizer:
    """Load from a folder or hub name, running no code that comes with the model. Pieces of text
    are remembered in ``memory``.

    Raises UnusableError, OSError, ValueError or whatever the files provoke.
    """
    # Our pool is the parallelism. tokenizers' own would hand each text to one more thread (100 us of
    # CPU a request) and take every core for a long list. It reads this at each call.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch is no news
    from transformers import AutoTokenizer  # noqa: PLC0415  (2 s of imports: in the loading thread)

    folder = Path(root)
    if folder.is_dir() and (any(folder.glob("tekken.json")) or any(folder.glob("tokenizer.model.v*"))):
        raise UnusableError("its engine uses Mistral's own tokenizer")
    loaded = AutoTokenizer.from_pretrained(root, trust_remote_code=False)
    if not loaded.is_fast:
        raise UnusableError("it has no fast tokenizer")
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        backend,
        _templates(root, loaded.chat_template, rendering, clock),
        special=loaded.special_tokens_map,
        longest=max(map(len, loaded.get_vocab())),
        segments=Segments(backend, _marks(backend, str(loaded.chat_template)), memory),
        rendering=rendering,
    )


def _marks(backend: Any, template: str) -> list[str]:
    """Tokens that one may cut at, as far as the model's template writes them."""
    added = [
        Added(token.content, token.special, token.normalized, token.lstrip, token.single_word)
        for token in backend.get_added_tokens_decoder().values()
    ]
    usual = [token for token in added if token.content in template]
    return [token.content for token in usual if stands_alone(token, added)][:8]


def _templates(root: str, own: Any, rendering: Rendering, clock: Callable[[], float]) -> Templates:
    if _json_file(root, "config.json").get("model_type") in _OWN_RENDERER:
        return Templates(None, None, "renderer")
    named: dict[str, str] = own if isinstance(own, dict) else {} if own is None else {"default": own}
    if rendering.chat_template is not None:
        given = named.get(rendering.chat_template) or _read(rendering.chat_template)
        sources: tuple[str | None, str | None] = (given, given)
    else:
        # A multimodal model's processor may bring a template of its own, used when there are no tools.
        processor = _json_file(root, "chat_template.json").get("chat_template")
        default = named.get("default")
        sources = (processor if isinstance(processor, str) else default, named.get("tool_use", default))
    try:
        made = [None if source is None else Template(source, clock=clock) for source in sources]
    except jinja2.TemplateError:
        return Templates(None, None, "bad_template")
    return Templates(made[0], made[1], "no_template")


def _read(template: str) -> str:
    """``--chat-template`` may be a path or the template itself."""
    inline = any(mark in template for mark in "{}\n")
    return template if inline else Path(template).read_text(encoding="utf-8")


def _json_file(root: str, name: str) -> dict[str, Any]:
    """A JSON file of the model, {} where there is none."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415

    try:
        path = cached_file(root, name)
        value = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
