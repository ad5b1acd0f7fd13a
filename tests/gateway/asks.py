"""Short ways to ask for the tokens of a request."""

from typing import Any

from gateway.openai import ChatRequest, CompletionRequest
from gateway.tokens import Prompt, Tokenizers

ROOM = 8192


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest(messages=list(messages), **fields)


def user(content: Any = "the water", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


async def one(
    tokenizers: Tokenizers, request: ChatRequest | CompletionRequest, room: int | None = ROOM
) -> Prompt:
    endpoint = "chat" if isinstance(request, ChatRequest) else "completions"
    (prompt,) = await tokenizers.prompts(endpoint, "m", request, room)
    return prompt
