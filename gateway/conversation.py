"""From a chat request's messages and tools to what a chat template is given.

Engines validate and rewrite both before rendering (vLLM 0.32: fields in the schema's order,
unknown ones after them; tool arguments parsed; parts joined or wrapped), and a template may print
any of it as JSON. This file does the same, so that the text is the same. It is pure.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Format = Literal["string", "openai"]
"""Whether a template takes a message's content as one string or as a list of parts."""

Message = dict[str, Any]

_TEXT_PARTS = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
_IMAGES = frozenset({"image_url", "image_pil", "image_embeds", "input_image"})
_SOUNDS = frozenset({"audio_url", "input_audio", "audio_embeds"})
_MEDIA_KEYS = _IMAGES | _SOUNDS | {"video_url", "video_embeds", "prompt_embeds", "file"}
_PART_FIELDS = (_MEDIA_KEYS - {"input_image", "prompt_embeds"}) | {
    *("closed", "data", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid")
}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_BILLING_HEADER = "x-anthropic-billing-header"


class NotExactError(Exception):
    """Why we cannot say which tokens the engine will see. ``reason`` is a short, fixed word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def conversation(messages: Sequence[Mapping[str, Any]], form: Format) -> list[Message]:
    """The messages as a template sees them; the request's own are not changed.

    Raises NotExactError for media, and for what the engine refuses.
    """
    return [_message(message, form) for message in messages]


def without_developer(messages: list[Message]) -> list[Message]:
    """For a template that knows no ``developer`` role: those messages become ``system``, and if
    system messages are then anywhere but in front, all are joined in front."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    renamed = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    at = [index for index, message in enumerate(renamed) if message["role"] == "system"]
    if at == [0]:
        return renamed
    said = [text for index in at if (text := _plain(renamed[index].get("content", "")))]
    rest = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(said)}, *rest]


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools with known fields only, in schema order, with the nulls that the engine fills in."""
    return None if tools is None else [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function, kind, defer = tool.get("function"), tool.get("type", "function"), tool.get("defer_loading")
    if not isinstance(function, dict) or kind != "function" or not isinstance(function.get("name"), str):
        raise NotExactError("tools")
    schema: dict[str, Any] = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        schema["strict"] = function["strict"]
    inner = function.get("defer_loading")
    inner = defer if inner is None else inner
    if inner is not None:
        schema["defer_loading"] = inner
    whole: dict[str, Any] = {"type": "function", "function": schema}
    if defer is not None:
        whole["defer_loading"] = defer
    return whole


def _message(message: Mapping[str, Any], form: Format) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise NotExactError("messages")
    parts = _parts(message.get("content"))
    if role == "system":
        parts = _without_billing(parts)
    pieces = [piece for part in parts if (piece := _piece(part)) is not None]
    made: Message = {"role": role}
    if form == "openai":
        made["content"] = pieces
    else:
        texts = (piece["text" if "text" in piece else "name"] for piece in pieces)
        made["content"] = "\n".join(text for text in texts if text)
    if role == "assistant":
        _add_calls(made, message)
        _add_reasoning(made, message)
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if form == "openai" and all(piece["type"] == "text" for piece in pieces):
            made["content"] = "\n".join(piece["text"] for piece in pieces)
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            made[field] = message[field]
    if role == "developer":
        made["tools"] = _declared(message.get("tools"))
    return made


def _declared(tools: Any) -> Any:
    """Tools that a message brings: in schema order, nothing taken away or added; as they are if malformed."""
    if not isinstance(tools, list):
        return tools
    ordered = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return tools
        if tool.get("type") != "function":
            return tools
        fields = {name: function[name] for name in _FUNCTION_FIELDS if name in function}
        ordered.append(
            {"function": fields | function, "type": "function"} | tool | {"function": fields | function}
        )
    return ordered


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise NotExactError("messages")


def _piece(part: Any) -> dict[str, Any] | None:
    """A content part as a template sees it; None for one that is left out."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise NotExactError("messages")
    kind = part.get("type")
    if not _MEDIA_KEYS.isdisjoint(part) or kind in _MEDIA_KEYS:
        raise NotExactError("media")
    if kind == "tool_reference" and part.get("uuid") is None:
        return {"type": "tool_reference", "name": part.get("name")}
    if kind not in _TEXT_PARTS or part.get("uuid") is not None:
        raise NotExactError("messages")
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise NotExactError("messages")
    return {"type": "text", "text": text} | {k: v for k, v in part.items() if k not in _PART_FIELDS}


def _without_billing(parts: list[Any]) -> list[Any]:
    """Without the attribution line some clients put in front of a system text: it changes with
    every request, so the engine drops it to keep the prefix."""
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _add_calls(made: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if not calls:
        return
    if not isinstance(calls, list):
        raise NotExactError("messages")
    made["tool_calls"] = [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function":
        raise NotExactError("tool_calls")
    if not all(isinstance(s, str) for s in (call.get("id"), function.get("name"), function.get("arguments"))):
        raise NotExactError("tool_calls")
    ordered: dict[str, Any] = {"arguments": None, "name": None} | function
    ordered["arguments"] = _arguments(function["arguments"])
    made: dict[str, Any] = {"id": None, "function": None, "type": None} | call
    return made | {"function": ordered}


def _arguments(text: str) -> dict[str, Any]:
    """Tool arguments as an object. What is no JSON object counts as an empty one, as in the engine."""
    try:
        value = json.loads(text) if text else {}
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _add_reasoning(made: Message, message: Mapping[str, Any]) -> None:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        made["reasoning"] = made["reasoning_content"] = reasoning


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content if isinstance(content, str) else ""
