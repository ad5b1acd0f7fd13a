"""The inference listener: OpenAI's routes in front, one exchange behind each request."""

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway import config
from gateway.exchange import CLIENT_GONE, Call, Exchanges
from gateway.http import (
    HEADERS,
    REQUEST_ID,
    TENANT,
    App,
    Guard,
    Receive,
    Scope,
    Send,
    not_admin,
    read_body,
    send_error,
)
from gateway.interrupt import Interrupt, Interrupted
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.openai import AnyRequest, ApiError, ChatRequest, CompletionRequest, Edits, Endpoint, edit, parse
from gateway.prediction import Apart
from gateway.route import Query
from gateway.stream import error_event
from gateway.tenants import Tenant, Tenants
from gateway.tokens import Prompt, Tokenizers
from gateway.workers import Workers

log = logging.getLogger("hotprefix.gateway")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""The only paths that need no key."""

PATHS: Mapping[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


class Parts(msgspec.Struct, frozen=True):
    """What the inference listener is made of."""

    settings: config.Gateway
    tenants: Tenants
    workers: Workers
    tokenizers: Tokenizers
    exchanges: Exchanges
    metrics: Metrics
    clock: Callable[[], float]


class Proxied:
    """The proxied endpoints: reads, validates, tokenizes, then hands over to ``Exchanges``."""

    def __init__(self, parts: Parts) -> None:
        self._settings, self._tenants = parts.settings, parts.tenants
        self._workers, self._tokenizers = parts.workers, parts.tokenizers
        self._exchanges, self._metrics, self._clock = parts.exchanges, parts.metrics, parts.clock
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.submitted()
        self._in_flight += 1
        outcome = "crashed"
        arrived = self._clock()
        interrupt, reply = Interrupt(), _Reply(send)
        watch: asyncio.Task[None] | None = None
        try:
            if self._in_flight > self._settings.limits.requests:
                raise ApiError(
                    503, "Too many requests in flight.", kind="server_error", code="overloaded", retry_after=1
                )
            body = await read_body(receive, self._settings.limits)
            watch = asyncio.create_task(_watch(receive, interrupt))
            with interrupt:
                call = await self._call(scope, body, arrived)
                outcome = await self._exchanges.run(call, reply)
        except ApiError as error:
            outcome = "refused" if error.status < 500 else "failed"
            await send_error(send, error, scope[REQUEST_ID])
        except Interrupted:
            outcome = "client_gone"
        except asyncio.CancelledError:  # the grace of a stop is over
            outcome = "stopped"
            await reply.stop(scope[REQUEST_ID])
        except Exception as error:  # counted as crashed; the message may quote a prompt, so it is not shown
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("request %s crashed: %s\n%s", scope[REQUEST_ID], type(error).__name__, where)
            if not reply.started:  # else the server cuts the connection of an answer without an end
                await send_error(send, crashed(), scope[REQUEST_ID])
        finally:
            if watch is not None:
                watch.cancel()
            self._in_flight -= 1
            self._metrics.ended(outcome)

    async def _call(self, scope: Scope, body: bytes, arrived: float) -> Call:
        path: str = scope["path"]
        endpoint = PATHS[path]
        tenant: Tenant = scope[TENANT]
        headers: dict[str, str] = scope[HEADERS]
        request = parse(endpoint, body)
        base, limit = self._model(request.model)
        prompts = await self._tokenizers.prompts(endpoint, base, request, limit, tenant.name)
        for prompt in prompts:
            if prompt.kind != "tokens":
                self._metrics.inexact(prompt.reason)
        salt = self._tenants.salt(tenant, request.cache_salt)
        ours = request.stream is True and not request.wants_usage
        edits = Edits(
            cache_salt=salt if self._tenants.several else None,
            include_usage=ours,
            drop_kv=not tenant.admin or self._tenants.open,
        )
        return Call(
            path=path,
            body=edit(body, edits),
            headers=headers,
            query=self._query(request, prompts, salt, headers, tenant),
            strip_usage=ours,
            private=self._hidden,
            show_hits=not self._hidden,
            request_id=scope[REQUEST_ID],
            arrived=arrived,
        )

    @property
    def _hidden(self) -> bool:
        """Several tenants learn nothing of what was cached, unless the operator says so."""
        shown = self._settings.hit_headers
        return shown == "never" or (shown == "auto" and self._tenants.several)

    def _model(self, model: str | None) -> tuple[str, int | None]:
        """The base model and longest context behind an id. Raises ApiError 404, or 503 without workers."""
        workers = self._workers.serving(model)
        if workers and workers[0].served is not None:
            lengths = [worker.served.max_model_len for worker in workers if worker.served]
            known_lengths = [length for length in lengths if length is not None]
            return workers[0].served.base, max(known_lengths) if len(known_lengths) == len(lengths) else None
        known = sorted(str(entry.get("id")) for entry in self._workers.models())
        if model is not None and known and not self._workers.known(model):
            raise ApiError(
                404,
                f"The model `{model}` does not exist; there is {', '.join(known)}.",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        raise ApiError(503, "No worker is ready.", kind="server_error", code="no_worker", retry_after=1)

    def _query(
        self,
        request: AnyRequest,
        prompts: list[Prompt],
        salt: str | None,
        headers: dict[str, str],
        tenant: Tenant,
    ) -> Query:
        session = (
            headers.get(self._settings.session_header.lower()) or request.prompt_cache_key or request.user
        )
        longest = request.max_tokens
        if isinstance(request, ChatRequest):
            longest = request.max_completion_tokens or longest
        return Query(
            model=request.model,
            prompts=[prompt for prompt in prompts if prompt.kind != "none"],
            salt=salt or "",
            session=session or "",
            tenant=tenant.name,
            max_tokens=longest or 0,
            priority=request.priority or 0,
            apart=_apart(request, len(prompts)),
        )


def _apart(request: AnyRequest, prompts: int) -> Apart:
    """Engines compute a prompt anew when its own log-probabilities are wanted; and of several prompts or
    answers they report one, which may have been cached by another."""
    if prompts > 1 or (request.n or 1) > 1 or request.use_beam_search:
        return "several"
    echoed = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    return "unread" if echoed or request.prompt_logprobs is not None else ""


async def _watch(receive: Receive, interrupt: Interrupt) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    interrupt.fire(CLIENT_GONE)


class _Reply:
    """The client's side of an exchange, over ASGI."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._streams = False

    async def start(self, status: int, headers: Mapping[str, str], *, length: int | None) -> None:
        self.started, self._streams = True, length is None
        head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        if length is not None:
            head.append((b"content-length", str(length).encode()))
        else:
            head += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def stop(self, request_id: str) -> None:
        """End an answer that the gateway's own end cuts short."""
        error = ApiError(503, "The gateway is stopping.", kind="server_error", code="stopping", retry_after=1)
        if self._streams:
            await self.write(error_event(error.body()), more=False)
        elif not self.started:
            await send_error(self._send, error, request_id)


def build_app(parts: Parts) -> App:
    """The inference listener's ASGI application."""
    app, workers, metrics = openai_app(), parts.workers, parts.metrics
    proxied = Proxied(parts)
    for path in PATHS:
        app.router.routes.append(Route(path, endpoint=proxied, methods=["POST"]))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": workers.models()})

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        up = workers.serving(None)
        known = all(parts.tokenizers.settled(worker.served.base) for worker in up if worker.served)
        is_ready = bool(up) and known
        return json_response({"ready": is_ready, "workers": len(up)}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def scrape(request: Request) -> Response:
        if not request.scope[TENANT].admin:
            raise not_admin()
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        """Proxied requests pass by the framework: its layers take a fifth of a small one's CPU."""
        direct = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS
        await (proxied if direct else app)(scope, receive, send)

    return Guard(front, parts.tenants, parts.settings.limits, open_paths=OPEN_PATHS, admin=False)


def openai_app() -> FastAPI:
    """A FastAPI application whose own errors are in OpenAI's form."""
    app = FastAPI(title="hotprefix", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        shaped = ApiError(
            error.status_code, f"{error.detail} ({request.method} {request.url.path})", kind=kind
        )
        return _error_response(shaped, request, error.headers)

    async def crash(request: Request, _: Exception) -> Response:
        return _error_response(crashed(), request, None)

    async def shaped_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(error, request, None)

    app.add_exception_handler(ApiError, shaped_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, crash)
    return app


def crashed() -> ApiError:
    """The error for a fault of our own."""
    return ApiError(
        500, "The gateway failed; its log says where.", kind="server_error", code="internal_error"
    )


def _error_response(error: ApiError, request: Request, headers: Mapping[str, str] | None) -> Response:
    merged = {**(headers or {}), "x-request-id": request.scope.get(REQUEST_ID, "")}
    return Response(error.body(), error.status, merged, media_type="application/json")


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
