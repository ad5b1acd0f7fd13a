"""Reads OpenAI requests the way vLLM does: what is wrong with them becomes a ``Refused``."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from loadtest.sim.cache import Space
from loadtest.sim.config import SimConfig
from loadtest.sim.tokens import Tokenizer

_INT_FIELDS = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "truncate_prompt_tokens")


class Refused(Exception):
    """A request the engine answers with an error of OpenAI's shape."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": param, "code": status}}
        )


class Ask(NamedTuple):
    """A request understood. One sequence runs per prompt and choice."""

    chat: bool
    model: str
    space: Space
    prompts: list[list[int]]
    n: int
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; Refused when there is none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    return value


def read_ask(request: Mapping[str, Any], chat: bool, config: SimConfig, tokenizer: Tokenizer) -> Ask:
    """Validate and tokenize a completion or chat request."""
    model, adapter = _model(request, config)
    for field in _INT_FIELDS:
        value = request.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise Refused(400, f"{field} must be an integer", param=field)
    salt = request.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise Refused(400, "cache_salt must be a non-empty string", param="cache_salt")
    options = request.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused(400, "stream_options must be an object", param="stream_options")
    max_tokens = request.get("max_completion_tokens") if chat else None
    if max_tokens is None:
        max_tokens = request.get("max_tokens")
    if max_tokens is not None and max_tokens < (1 if chat else 0):
        raise Refused(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    n = request.get("n") or 1
    if not 1 <= n <= 64:
        raise Refused(400, "n must be from 1 to 64", param="n")
    prompts = [chat_tokens(request, tokenizer)] if chat else _prompts(request, tokenizer)
    prompts = [_fit(prompt, max_tokens, request, config) for prompt in prompts]
    stream = bool(request.get("stream"))
    return Ask(
        chat=chat,
        model=model,
        space=Space(adapter, salt or ""),
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        min_tokens=request.get("min_tokens") or 0,
        ignore_eos=bool(request.get("ignore_eos")),
        echo=bool(request.get("echo")) and not chat,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
    )


def chat_tokens(request: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """A chat request's prompt. The template writes the special tokens itself."""
    if request.get("add_generation_prompt", True) and request.get("continue_final_message"):
        raise Refused(400, "continue_final_message and add_generation_prompt exclude each other")
    try:
        text = tokenizer.render(request)
    except ValueError as error:
        raise Refused(400, str(error), param="messages") from error
    return tokenizer.encode(text, special=bool(request.get("add_special_tokens", False)))


def text_tokens(request: Mapping[str, Any], text: str, tokenizer: Tokenizer) -> list[int]:
    """A completion prompt given as text."""
    return tokenizer.encode(text, special=bool(request.get("add_special_tokens", True)))


def _model(request: Mapping[str, Any], config: SimConfig) -> tuple[str, str]:
    model = request.get("model")
    if model is None:
        return config.model, ""
    if not isinstance(model, str):
        raise Refused(400, "model must be a string", param="model")
    if model in config.adapters:
        return model, model
    if model != config.model:
        raise Refused(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
    return model, ""


def _prompts(request: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return [text_tokens(request, prompt, tokenizer)]
    if not isinstance(prompt, list) or not prompt:
        raise Refused(400, "prompt must be a string or a non-empty list", param="prompt")
    if all(_is_token(item) for item in prompt):
        return [prompt]
    prompts: list[list[int]] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(text_tokens(request, item, tokenizer))
        elif isinstance(item, list) and item and all(_is_token(token) for token in item):
            prompts.append(item)
        else:
            raise Refused(400, "prompt must hold strings or lists of token ids", param="prompt")
    return prompts


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32


def _fit(
    prompt: list[int], max_tokens: int | None, request: Mapping[str, Any], config: SimConfig
) -> list[int]:
    keep = request.get("truncate_prompt_tokens")
    if keep is not None:
        keep = config.max_model_len if keep == -1 else keep
        if keep < 1 or keep > config.max_model_len:
            raise Refused(400, "truncate_prompt_tokens is out of range", param="truncate_prompt_tokens")
        prompt = prompt[:keep] if request.get("truncation_side") == "right" else prompt[-keep:]
    if not prompt:
        raise Refused(400, "The decoder prompt cannot be empty", param="prompt")
    limit = config.max_model_len
    if len(prompt) >= limit or len(prompt) + (max_tokens or 0) > limit:
        raise Refused(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{max_tokens or 0} output tokens and your prompt contains {len(prompt)} input tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    return prompt
