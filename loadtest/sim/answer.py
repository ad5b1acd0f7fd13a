"""Answers in vLLM's shapes: whole ones, chunks of a stream, models, metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadtest.sim.ask import Ask
from loadtest.sim.config import SimConfig
from loadtest.sim.queue import Counters

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def sse(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    """``cached`` None: the engine does not report it."""
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


class Shape:
    """The answers to one request: its id, time, model and kind are the same in each chunk."""

    def __init__(self, ask: Ask, request_id: str, created: int) -> None:
        self._ask = ask
        kind = ("chat.completion" if ask.chat else "text_completion") + (
            ".chunk" if ask.chat and ask.stream else ""
        )
        prefix = "chatcmpl" if ask.chat else "cmpl"
        self._base = {"id": f"{prefix}-{request_id}", "object": kind, "created": created, "model": ask.model}

    def whole(self, texts: Sequence[str], finishes: Sequence[str], used: dict[str, Any]) -> bytes:
        """The answer that is not streamed."""
        pairs = enumerate(zip(texts, finishes, strict=True))
        choices = [self._choice(i, text, finish) for i, (text, finish) in pairs]
        return _encode(
            {
                **self._base,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": None,
                "usage": used,
                "kv_transfer_params": None,
            }
        )

    def first(self, index: int, used: dict[str, Any] | None) -> bytes:
        """The chunk before any token: a chat's role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, used)

    def token(self, index: int, text: str, finish: str | None, used: dict[str, Any] | None) -> bytes:
        """A chunk with one token's text; ``finish`` in the last one."""
        return self._chunk(index, {"content": text} if self._ask.chat else text, finish, used)

    def last(self, used: dict[str, Any]) -> bytes:
        """The usage chunk, whose choices are empty."""
        return sse({**self._base, "choices": [], "usage": used})

    def _chunk(self, index: int, delta: object, finish: str | None, used: dict[str, Any] | None) -> bytes:
        content = "delta" if self._ask.chat else "text"
        choice = {"index": index, content: delta, "logprobs": None, "finish_reason": finish}
        if finish is not None or not self._ask.chat:
            choice["stop_reason"] = None
        value = {**self._base, "choices": [choice]}
        if used is not None:
            value["usage"] = used
        return sse(value)

    def _choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        ending = {"logprobs": None, "finish_reason": finish, "stop_reason": None}
        if not self._ask.chat:
            return {"index": index, "text": text, **ending, "prompt_logprobs": None}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        return {"index": index, "message": message, **ending}


def models(config: SimConfig, created: int) -> bytes:
    """``/v1/models``: the base model first, adapters after it with their parent."""
    base = _card(config.model, config.model_path or config.model, None, config.max_model_len, created)
    loras = [_card(name, path, config.model, None, created) for name, path in config.adapters.items()]
    return _encode({"object": "list", "data": [base, *loras]})


def _card(name: str, root: str, parent: str | None, length: int | None, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": length,
        "permission": [],
    }


def metrics(config: SimConfig, counters: Counters, kv_usage: float, started: float) -> bytes:
    """``/metrics`` under vLLM's names."""
    label = f'{{engine="0",model_name="{config.model}"}}'
    values: tuple[tuple[str, str, float], ...] = (
        ("vllm:num_requests_running", "gauge", counters.running),
        ("vllm:num_requests_waiting", "gauge", counters.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", kv_usage),
        ("vllm:prefix_cache_queries_total", "counter", counters.queries),
        ("vllm:prefix_cache_hits_total", "counter", counters.hits),
        ("vllm:external_prefix_cache_queries_total", "counter", 0),
        ("vllm:external_prefix_cache_hits_total", "counter", 0),
        ("vllm:prompt_tokens_total", "counter", counters.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", counters.generated),
        ("vllm:request_success_total", "counter", counters.finished),
    )
    lines = [
        line
        for name, kind, value in values
        for line in (
            f"# HELP {name} Simulated.",
            f"# TYPE {name} {kind}",
            f"{name}{label} {float(value)}",
        )
    ]
    lines += [
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started!r}",
        f'vllm:cache_config_info{{block_size="{config.block_size}",'
        f'num_gpu_blocks="{config.num_blocks}"}} 1.0',
    ]
    return ("\n".join(lines) + "\n").encode()
