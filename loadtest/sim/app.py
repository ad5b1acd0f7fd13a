"""The routes of a simulated engine, and what its faults do to an answer."""

import asyncio
from collections import deque
from typing import NamedTuple

import msgspec

from loadtest.sim import answer
from loadtest.sim.ask import Ask, Refused, chat_tokens, read_ask, read_object, text_tokens
from loadtest.sim.cache import BlockCache, TooLarge
from loadtest.sim.clock import Clock
from loadtest.sim.config import SimConfig
from loadtest.sim.faults import FaultBox
from loadtest.sim.http import Reply, Request
from loadtest.sim.queue import Plan, Queue, plan_answer
from loadtest.sim.tokens import Tokenizer


class Cut(Exception):
    """A fault ends this answer now; the connection was cut."""


class Outcome(NamedTuple):
    """One finished sequence."""

    text: str
    finish: str
    tokens: int
    cached: int


class App:
    """One life of an engine: a restart makes a new one. ``exit_now`` is called when a fault kills
    the whole engine."""

    def __init__(
        self,
        *,
        config: SimConfig,
        tokenizer: Tokenizer,
        clock: Clock,
        faults: FaultBox,
        cache: BlockCache,
        queue: Queue,
        started: float,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.clock = clock
        self.faults = faults
        self.cache = cache
        self.queue = queue
        self.started = started
        self.requests: deque[Request] = deque(maxlen=config.record)
        self.exit_now = asyncio.Event()
        self._serial = 0

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answer one request of the engine's API."""
        route = (request.method, request.path)
        if request.method == "POST":
            self.requests.append(request)
        try:
            if route in {("POST", "/v1/chat/completions"), ("POST", "/v1/completions")}:
                await self._complete(request, reply)
            elif route == ("POST", "/tokenize"):
                reply.send(200, self._tokenize(request))
            else:
                self._small(route, reply)
        except Refused as refused:
            reply.send(refused.status, refused.body)
        except Cut:
            reply.cut()

    def _small(self, route: tuple[str, str], reply: Reply) -> None:
        if route == ("GET", "/health"):
            reply.send(503 if self.faults.now.unhealthy else 200, b"", "text/plain")
        elif route == ("GET", "/v1/models"):
            reply.send(200, answer.models(self.config, int(self.started)))
        elif route == ("GET", "/metrics"):
            body = answer.metrics(self.config, self.queue.counters, self.cache.usage, self.started)
            reply.send(200, body, "text/plain; version=0.0.4; charset=utf-8")
        elif route == ("GET", "/version"):
            reply.send(200, b'{"version":"0.32.0+sim"}')
        elif route == ("POST", "/reset_prefix_cache") and self.config.dev_mode:
            done = self.cache.reset()
            self.queue.flush()
            reply.send(200 if done else 409, b"", "text/plain")
        else:
            raise Refused(404, "Not Found", "NotFoundError")

    def _tokenize(self, request: Request) -> bytes:
        body = read_object(request.body)
        if "messages" in body:
            tokens = chat_tokens(body, self.tokenizer)
        elif isinstance(body.get("prompt"), str):
            tokens = text_tokens(body, body["prompt"], self.tokenizer)
        else:
            raise Refused(400, "prompt or messages is needed", param="prompt")
        return msgspec.json.encode(
            {
                "count": len(tokens),
                "max_model_len": self.config.max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    # -- completions ----------------------------------------------------------------------------

    async def _complete(self, request: Request, reply: Reply) -> None:
        faults = self.faults
        if faults.take("fail_next"):
            raise Refused(faults.now.fail_status, "simulated failure", "InternalServerError")
        if faults.now.die_at_once:
            raise Cut
        if faults.now.hang:
            await asyncio.Event().wait()
        await self.clock.sleep(faults.now.slow)
        chat = request.path == "/v1/chat/completions"
        ask = read_ask(read_object(request.body), chat, self.config, self.tokenizer)
        self._serial += 1
        name = request.header("x-request-id") or f"sim{self.config.seed:x}-{self._serial:x}"
        shape = answer.Shape(ask, name, int(self.started))
        run = _Run(self, ask, shape, reply)
        if ask.stream:
            reply.start_stream()
        await run.all()

    def plan(self, ask: Ask, prompt: list[int], choice: int) -> Plan:
        """The answer this engine gives to a prompt: the same on each replica with the same seed."""
        return plan_answer(
            prompt,
            self.tokenizer,
            natural=self.config.output_tokens,
            max_tokens=ask.max_tokens,
            room=self.config.max_model_len - len(prompt),
            seed=f"{self.config.seed}/{choice}",
            ignore_eos=ask.ignore_eos,
            min_tokens=ask.min_tokens,
        )


class _Run:
    """All sequences of one request, and the faults that strike while they run."""

    def __init__(self, app: App, ask: Ask, shape: answer.Shape, reply: Reply) -> None:
        self._app = app
        self._ask = ask
        self._shape = shape
        self._reply = reply
        self._given = 0

    async def all(self) -> None:
        ask = self._ask
        pairs = [(prompt, choice) for prompt in ask.prompts for choice in range(ask.n)]
        jobs = [self._sequence(index, *pair) for index, pair in enumerate(pairs)]
        tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]
        try:
            outcomes = await asyncio.gather(*tasks)
        except TooLarge as error:
            raise Refused(400, str(error)) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        prompt_tokens = sum(map(len, ask.prompts))
        completion = sum(outcome.tokens for outcome in outcomes)
        # vLLM reports the cached tokens of one prompt only: a stream's first, otherwise the last.
        cached = outcomes[0 if ask.stream else -1].cached
        details = cached if self._app.config.prompt_tokens_details else None
        used = answer.usage(prompt_tokens, completion, details)
        if not ask.stream:
            texts = [outcome.text for outcome in outcomes]
            self._reply.send(200, self._shape.whole(texts, [outcome.finish for outcome in outcomes], used))
            return
        if ask.include_usage:
            self._emit(self._shape.last(used))
        self._emit(answer.DONE)
        self._reply.end_stream()

    async def _sequence(self, index: int, prompt: list[int], choice: int) -> Outcome:
        app, ask = self._app, self._ask
        plan = app.plan(ask, prompt, choice)
        echo = app.tokenizer.decode(prompt) if ask.echo else ""
        await self._strike()
        async with app.queue.run(prompt, ask.space, len(plan.tokens)) as held:
            cached = held.cached_tokens
            if ask.stream and ask.chat:
                self._emit(self._shape.first(index, self._so_far(prompt, 0)))
            if ask.stream and not plan.tokens:
                self._emit(self._shape.token(index, echo, plan.finish, self._so_far(prompt, 0)))
            said = ""
            for count, token in enumerate(plan.tokens, 1):
                await app.queue.decode(held, token)
                if ask.stream:
                    text = app.tokenizer.decode(plan.tokens[:count])
                    delta, said = (echo if count == 1 else "") + text[len(said) :], text
                    finish = plan.finish if count == len(plan.tokens) else None
                    self._emit(self._shape.token(index, delta, finish, self._so_far(prompt, count)))
                self._given += 1
                await self._strike()
        return Outcome(echo + app.tokenizer.decode(plan.tokens), plan.finish, len(plan.tokens), cached)

    def _so_far(self, prompt: list[int], count: int) -> dict[str, object] | None:
        return answer.usage(len(prompt), count, None) if self._ask.continuous_usage else None

    def _emit(self, event: bytes) -> None:
        if self._app.faults.now.malformed_sse:
            event = event.replace(b"{", b"{{", 1).replace(b'":', b'"', 1)
        self._reply.chunk(event)

    async def _strike(self) -> None:
        faults = self._app.faults.now
        if faults.exit_after is not None and self._given >= faults.exit_after:
            self._app.exit_now.set()
            raise Cut
        if faults.die_after is not None and self._given >= faults.die_after:
            raise Cut
        if faults.hang_after is not None and self._given >= faults.hang_after:
            await asyncio.Event().wait()
