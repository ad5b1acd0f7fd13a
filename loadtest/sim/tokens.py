"""Tokenizers a simulated engine can use: a model folder's own, or plain bytes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the engine needs. ``eos`` is the id that ends an answer, or None."""

    eos: int | None

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer adds by itself (BOS)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""

    def render(self, request: Mapping[str, Any]) -> str:
        """A chat request's prompt text. Raises ValueError when it cannot be rendered."""


class ByteTokenizer:
    """One token per UTF-8 byte and a ChatML template in code. Loads nothing, so tests start fast."""

    eos: int | None = 257
    _special = {"<|im_start|>": 256, "<|im_end|>": 257}  # noqa: RUF012 (never changed)

    def encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = []
        rest = text
        while rest:
            at, marker = min(((rest.find(m), m) for m in self._special if m in rest), default=(-1, ""))
            plain = rest if at < 0 else rest[:at]
            ids += plain.encode("utf-8", "surrogatepass")
            if at < 0:
                break
            ids.append(self._special[marker])
            rest = rest[at + len(marker) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def render(self, request: Mapping[str, Any]) -> str:
        messages = plain_messages(request)
        tools = request.get("tools")
        text = f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
        for message in messages:
            text += f"<|im_start|>{message['role']}\n{message.get('content') or ''}<|im_end|>\n"
        if request.get("continue_final_message"):
            return text.removesuffix("<|im_end|>\n")
        return text + ("<|im_start|>assistant\n" if request.get("add_generation_prompt", True) else "")


class FolderTokenizer:
    """The tokenizer and chat template of a Hugging Face folder, through transformers (no torch)."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 (takes seconds; only who needs it pays)

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.eos: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def render(self, request: Mapping[str, Any]) -> str:
        options: dict[str, Any] = dict(request.get("chat_template_kwargs") or {})
        if request.get("reasoning_effort") is not None:
            options.setdefault("reasoning_effort", request["reasoning_effort"])
        try:
            text: str = self._tokenizer.apply_chat_template(
                plain_messages(request),
                tools=request.get("tools"),
                documents=request.get("documents"),
                add_generation_prompt=request.get("add_generation_prompt", True),
                continue_final_message=request.get("continue_final_message", False),
                tokenize=False,
                **options,
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refused the request: {error}") from error
        return text


def plain_messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined by newlines, the arguments of tool
    calls parsed. Raises ValueError for anything that is no list of messages."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    return [_plain_message(message) for message in messages]


def _plain_message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("each message must be an object with a role")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else _text_part(part) for part in content]
        plain["content"] = "\n".join(parts)
    elif content is not None and not isinstance(content, str):
        raise ValueError("content must be a string, a list of parts or null")
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _text_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError("only text parts are understood")


def _tool_call(call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise ValueError("a tool call must be an object with a function")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError as error:
            raise ValueError("tool call arguments are no JSON") from error
    return {**call, "function": function}
