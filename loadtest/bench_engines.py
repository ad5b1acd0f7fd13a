"""``hotprefix bench engines``: what routing, or the cache node, is worth on real engines.

Scenario ``conversations``: several conversations of a few turns, each starting from a document of its own,
the order shuffled anew each turn; the same texts under each policy, every cache emptied before. Scenario
``node`` is in ``loadtest/bench_node_engines.py``.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from hotprefix.engine_env import ensure_engine
from hotprefix.engines import Engine, EngineSpec, Fleet, allowed_cores, core_shares
from hotprefix.home import find_home
from hotprefix.local_gateway import LocalGateway
from hotprefix.model import DEFAULT_MODEL, ensure_model
from hotprefix.progress import say_error
from loadtest import bench_node_engines
from loadtest.conversations import Conversation, conversations, shuffled
from loadtest.report import claim, report, show

ARMS = ("round-robin", "learned-prefix", "prefix")
BLOCK = 32
SERVED = "smollm2"
DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 900, 115, 16
"""A turn grows a conversation by its question, its answer and the template's own words: about 150."""


class Turn(msgspec.Struct):
    """One request and what was seen of it. Times in seconds, lengths in tokens."""

    conversation: int
    turn: int
    worker: str
    policy: str
    predicted: int
    cached: int
    ttft: float
    prompt: list[int]
    answer: list[int]
    text: str
    ideal: int = 0


def main(arguments: Sequence[str]) -> int:
    """Entry of the command; returns 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(prog="hotprefix bench engines", description=__doc__)
    parser.add_argument("--scenario", choices=["conversations", "node"], default="conversations")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--runs", type=int, default=5, help="how often each arm is run, interleaved")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further run after so long")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=4, help="requests in flight at once")
    parser.add_argument("--seed", type=int, default=1)
    parts = bench_node_engines.PARTS
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="of the scenario node")
    options = parser.parse_args(arguments)
    if options.scenario == "node":
        return show(bench_node_engines.run(options), "a cache node and real engines", options.json)
    return show(run(options), "conversations on two real engines", options.json)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start two engines, run every arm ``runs`` times in turn, and compare."""
    home = find_home()
    ensure_engine(home, say_error)
    model = str(ensure_model(home, DEFAULT_MODEL, say_error))
    done: dict[str, list[list[Turn]]] = {arm: [] for arm in ARMS}
    with Fleet(home) as fleet:
        for index, cores in enumerate(core_shares(2, allowed_cores())):
            fleet.start_engine(
                EngineSpec(
                    name=f"engine-{index}",
                    model=model,
                    served_name=SERVED,
                    cores=cores,
                    block_size=BLOCK,
                    dev_mode=True,
                )
            )
        fleet.wait_healthy(say=say_error)
        asyncio.run(_warm_up(fleet))
        until = time.monotonic() + 60 * options.minutes
        for number in range(options.runs):
            if number and time.monotonic() > until:
                say_error(f"no time for more than {number} runs")
                break
            texts = conversations(
                options.conversations,
                options.turns,
                document_tokens=DOCUMENT_TOKENS,
                turn_tokens=QUESTION_TOKENS,
                seed=options.seed + number,
            )
            for position in range(len(ARMS)):
                arm = ARMS[(position + number) % len(ARMS)]
                turns = _arm(fleet, arm, texts, options, number)
                done[arm].append(turns)
                ttft, share = statistics.mean(_later(turns)), _share(turns)
                say_error(f"run {number + 1}: {arm}, TTFT {ttft:.2f} s, cached {share:.3f} of the ideal")
    return _report(done, options)


def _arm(
    fleet: Fleet, arm: str, texts: list[Conversation], options: argparse.Namespace, number: int
) -> list[Turn]:
    config = {"policy": {"name": arm}, "seed": number}
    gateway = LocalGateway(fleet.engines, fleet.folder, find_home().logs, config=config)
    try:
        gateway.wait_ready()
        return asyncio.run(_Arm(fleet, gateway, arm, texts, options.concurrency).run(options.turns, number))
    finally:
        gateway.stop()


class _Arm:
    """One pass over all conversations through one gateway, from cold caches."""

    def __init__(
        self, fleet: Fleet, gateway: LocalGateway, arm: str, texts: list[Conversation], concurrency: int
    ) -> None:
        self._fleet, self._url, self._admin_url = fleet, gateway.url, gateway.admin_url
        self._arm, self._texts, self._concurrency = arm, texts, concurrency
        self._history: list[list[dict[str, str]]] = [
            [{"role": "system", "content": text.document}] for text in texts
        ]
        self._computed: list[list[int]] = []
        self._turns: list[Turn] = []

    async def run(self, turns: int, number: int) -> list[Turn]:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for engine in self._fleet.engines:
                async with session.post(engine.url + "/reset_prefix_cache") as answer:
                    answer.raise_for_status()
                    if (await answer.json()) not in ({"success": True}, None):
                        raise RuntimeError(f"{engine.name} did not empty its cache")
                # vLLM says so only with its next step; this prompt is shorter than a block.
                await _complete(session, engine, "Hi", 1)
            await self._know_it(session)
            gate = asyncio.Semaphore(self._concurrency)
            for turn in range(turns):
                order = shuffled(len(self._texts), turn, number)
                await asyncio.gather(*(self._ask(session, gate, one, turn) for one in order))
        return self._turns

    async def _know_it(self, session: aiohttp.ClientSession) -> None:
        """Wait until the gateway has heard that the caches are empty: in the history it fetched at its
        start the same texts were held."""
        for _ in range(600):
            async with session.get(self._admin_url + "/v1/workers") as answer:
                workers = (await answer.json())["workers"]
            if all(w["events"]["trust"] == "exact" and not w["events"]["blocks"] for w in workers):
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the gateway did not learn within a minute that the caches are empty")

    async def _ask(
        self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, one: int, turn: int
    ) -> None:
        async with gate:
            messages = self._history[one]
            messages.append({"role": "user", "content": self._texts[one].questions[turn]})
            known = list(self._computed)
            seen = await _stream(session, self._url, messages)
            seen.conversation, seen.turn = one, turn
            if seen.policy != self._arm:
                raise RuntimeError(f"routed by {seen.policy}, not by {self._arm}")
            if turn == 0 and seen.cached >= 2 * BLOCK:
                raise RuntimeError(f"{seen.cached} tokens of a new text were cached: caches were not cold")
            seen.ideal = max((_common(seen.prompt, before) for before in known), default=0)
            self._computed.append(seen.prompt + seen.answer[:-1])
            self._turns.append(seen)
            messages.append({"role": "assistant", "content": seen.text})


async def _stream(session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]) -> Turn:
    body = {
        "model": SERVED,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    began = time.perf_counter()
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {await answer.text()}")
        turn = Turn(
            conversation=0,
            turn=0,
            worker=answer.headers["x-hotprefix-worker"],
            policy=answer.headers["x-hotprefix-policy"],
            predicted=int(answer.headers["x-hotprefix-matched-tokens"]),
            cached=-1,
            ttft=0.0,
            prompt=[],
            answer=[],
            text="",
        )
        async for line in answer.content:
            if line.startswith(b"data: {"):
                _take_event(turn, json.loads(line[6:]), time.perf_counter() - began)
    if turn.cached < 0 or not turn.prompt or not turn.answer:
        raise RuntimeError("the engine did not report token ids and cached tokens")
    return turn


def _take_event(turn: Turn, event: dict[str, Any], elapsed: float) -> None:
    if "error" in event:
        raise RuntimeError(f"the stream broke off: {event['error']}")
    if event.get("prompt_token_ids"):
        turn.prompt = event["prompt_token_ids"]
    if event.get("usage"):
        turn.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    for choice in event["choices"]:
        turn.answer += choice.get("token_ids") or []
        content = choice["delta"].get("content") or ""
        if content and not turn.text:
            turn.ttft = elapsed
        turn.text += content


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


async def _warm_up(fleet: Fleet) -> None:
    """Let each engine compile and allocate what only its first requests cost."""
    async with aiohttp.ClientSession() as session:
        for engine in fleet.engines:
            for number in range(3):
                await _complete(session, engine, f"{number} warm up " * 150, 8)


async def _complete(session: aiohttp.ClientSession, engine: Engine, prompt: str, max_tokens: int) -> None:
    body = {"model": SERVED, "prompt": prompt, "max_tokens": max_tokens}
    async with session.post(engine.url + "/v1/completions", json=body) as answer:
        answer.raise_for_status()


def _later(turns: list[Turn]) -> list[float]:
    return [turn.ttft for turn in turns if turn.turn > 0]


def _share(turns: list[Turn]) -> float:
    return sum(turn.cached for turn in turns) / sum(turn.ideal for turn in turns)


def _report(done: dict[str, list[list[Turn]]], options: argparse.Namespace) -> dict[str, Any]:
    ratios = [
        statistics.mean(_later(ours)) / statistics.mean(_later(theirs))
        for ours, theirs in zip(done["prefix"], done["round-robin"], strict=True)
    ]
    predictions = [abs(turn.predicted - turn.cached) <= BLOCK for run in done["prefix"] for turn in run]
    figures: dict[str, Any] = {"concurrency": options.concurrency, "requests_per_run": len(done["prefix"][0])}
    for arm, runs in done.items():
        flat = [turn for run in runs for turn in run]
        figures[arm] = {
            "cached_share": round(statistics.median(_share(run) for run in runs), 4),
            "ttft_mean_s": round(statistics.median(statistics.mean(_later(run)) for run in runs), 4),
            "ttft_p90_s": round(statistics.quantiles(_later(flat), n=10)[-1], 4),
            "ttft_first_turn_s": round(statistics.mean(turn.ttft for turn in flat if turn.turn == 0), 4),
            "prompt_tokens_mean": round(statistics.mean(len(turn.prompt) for turn in flat), 1),
            "ideal_tokens_mean": round(statistics.mean(turn.ideal for turn in flat), 1),
        }
    figures["ttft_ratio_runs"] = [round(ratio, 3) for ratio in ratios]
    share = statistics.median(_share(run) for run in done["prefix"])
    claims = [
        claim("conversations.cached_share", share, ">=", 0.97),
        claim("conversations.ttft_ratio", statistics.median(ratios), "<=", 0.5),
        claim("conversations.prediction", statistics.mean(predictions), ">=", 0.99),
    ]
    return report(claims, figures, len(ratios))
