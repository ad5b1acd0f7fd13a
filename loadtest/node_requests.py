"""Requests to engines whose prompts are token ids, timed as a client sees them."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

SERVED = "smollm2"
_TOKENS = (1_000, 40_000)
"""Token ids that prompts are drawn from: ordinary words of SmolLM2's vocabulary, no special ones."""


class Seen(msgspec.Struct):
    """One answer. ``times``: when each token arrived, in seconds on the clock of ``time.perf_counter``;
    ``cached``: tokens of the prompt that the engine did not compute."""

    sent: float
    times: list[float]
    cached: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent


def prompt(seed: str, tokens: int) -> list[int]:
    """So many token ids, the same for the same ``seed``, without a common beginning with another seed's."""
    rng = random.Random(seed)
    return [rng.randrange(*_TOKENS) for _ in range(tokens)]


def session() -> aiohttp.ClientSession:
    """Connections are kept: a new one would be part of a TTFT."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), trust_env=False)


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    ids: list[int],
    tokens: int = 1,
    on_token: Callable[[int], object] | None = None,
) -> Seen:
    """Sends one request and reads its whole answer; ``on_token`` is told how many tokens have come. Raises
    RuntimeError when the engine refuses it or does not say what was cached."""
    body = {
        "model": SERVED,
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    seen = Seen(time.perf_counter(), [], -1)
    headers = {"content-type": "application/json"}
    async with client.post(url + "/v1/completions", data=data, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                _take(seen, json.loads(line[6:]), time.perf_counter())
                if on_token is not None:
                    on_token(len(seen.times))
    if not seen.times or seen.cached < 0:
        raise RuntimeError("the engine did not answer with tokens and their usage")
    return seen


def _take(seen: Seen, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        raise RuntimeError(f"the stream broke off: {event['error']}")
    if event.get("usage"):
        seen.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if event["choices"]:
        seen.times.append(now)


async def counter(client: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum over all labels of a metric at ``url``/metrics; 0 where it has not been counted yet."""
    async with client.get(url + "/metrics") as answer:
        answer.raise_for_status()
        return total(await answer.text(), name)


def total(metrics: str, name: str) -> float:
    """The sum over all labels of one metric in Prometheus' text form."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith((name + "{", name + " "))
    )
