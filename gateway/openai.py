"""The OpenAI shapes: what we read of a request, what we write as an error.

The original body bytes are kept and forwarded. Only the fields named in ``Edits`` are ever
touched, and each other field's value keeps its exact bytes. This file knows no worker and no index.
"""

import gc
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Endpoint = Literal["chat", "completions"]

KV_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Top-level fields that steer an engine's KV (and encoder cache) connector: removed unless the client
is an admin."""

MAX_PROMPTS, MAX_MESSAGES, MAX_TOOLS = 1024, 16_384, 4096
"""Prompts, messages, and tools or documents in one request."""

_KV_WORDS = ("kv_", "kv-", "hotprefix", "lmcache", "remote_block", "remote_engine")


class ApiError(Exception):
    """An answer in OpenAI's error form. ``retry_after`` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = 1
    user: str | None = None
    priority: int | None = 0
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = False

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Common, kw_only=True):
    """``POST /v1/chat/completions``. Fields we do not read are not listed; they are forwarded."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Any = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Common, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: Any = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


AnyRequest = ChatRequest | CompletionRequest

_decoders: Mapping[Endpoint, msgspec.json.Decoder[Any]] = {
    "chat": msgspec.json.Decoder(ChatRequest, strict=False),
    "completions": msgspec.json.Decoder(CompletionRequest, strict=False),
}
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse(endpoint: Endpoint, body: bytes) -> AnyRequest:
    """Raises ApiError(400) for what no engine could serve, naming the field where there is one."""
    gc.disable()  # it would walk through millions of small objects, for nothing, again and again
    try:
        request: AnyRequest = _decoders[endpoint].decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        _, _, where = text.partition(" - at `$.")
        raise ApiError(400, text, param=where.rstrip("`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    finally:
        gc.enable()
    if isinstance(request, ChatRequest):
        _check_chat(request)
    if isinstance(request, CompletionRequest):
        _check_prompt(request)
    return request


def _check_chat(request: ChatRequest) -> None:
    for name, given, most in (
        ("messages", request.messages, MAX_MESSAGES),
        ("tools", request.tools, MAX_TOOLS),
        ("documents", request.documents, MAX_TOOLS),
    ):
        if given is not None and len(given) > most:
            raise ApiError(400, f"At most {most} {name} in one request.", param=name)


def _check_prompt(request: CompletionRequest) -> None:
    prompt = request.prompt
    if prompt is None and request.prompt_embeds is None:
        raise ApiError(400, "`prompt` is required", param="prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise ApiError(400, f"At most {MAX_PROMPTS} prompts in one request.", param="prompt")


class Edits(msgspec.Struct, frozen=True):
    """The only changes ever made to a request's body.

    ``cache_salt``: the tenant's, replacing the client's. ``include_usage``: ask for the usage chunk of a
    stream, and for that one only. ``drop_kv``: remove fields that steer the KV connector.
    """

    cache_salt: str | None = None
    include_usage: bool = False
    drop_kv: bool = True


def edit(body: bytes, edits: Edits) -> bytes:
    """The body with ``edits`` applied; the same object when there was nothing to change. Raises
    ApiError(400) where the body cannot be read in full."""
    try:
        members = _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from error
    changed = False
    if edits.drop_kv:
        changed = _drop_kv(members)
    if edits.cache_salt is not None:
        members["cache_salt"] = msgspec.Raw(msgspec.json.encode(edits.cache_salt))
        changed = True
    if edits.include_usage:
        raw = members.get("stream_options")
        options = _members.decode(raw) if raw is not None and bytes(raw) != b"null" else {}
        options["include_usage"] = msgspec.Raw(b"true")
        options.pop(
            "continuous_usage_stats", None
        )  # void without include_usage, which the client did not ask
        members["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
        changed = True
    return msgspec.json.encode(members) if changed else body


def _drop_kv(members: dict[str, msgspec.Raw]) -> bool:
    """Remove what steers the KV connector; true when something was there."""
    found = [name for name in KV_FIELDS if members.pop(name, None) is not None]
    extra = members.get("vllm_xargs")
    if extra is None:
        return bool(found)
    try:
        arguments = _members.decode(extra)
    except msgspec.DecodeError:
        return bool(found)  # not an object: the engine refuses it
    steering = [name for name in arguments if name.lower().startswith(_KV_WORDS)]
    for name in steering:
        del arguments[name]
    if steering:
        members["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(arguments))
    return bool(found or steering)
