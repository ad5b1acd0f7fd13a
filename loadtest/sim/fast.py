"""Canned answers for benchmarks: the least CPU a Python engine can spend per request."""

from loadtest.sim.config import SimConfig
from loadtest.sim.http import Fast, Request, chunked, head

CHUNKS = 16
_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


def canned(config: SimConfig) -> Fast:
    """A function that answers completions at once: whole, or as ``CHUNKS`` chunks, each its own
    write. It looks for ``"stream": true`` and ``"include_usage": true`` in the bytes and parses nothing."""
    answers = {
        (path, stream, used): _answer(config.model, path == "/v1/chat/completions", stream, used)
        for path in _PATHS
        for stream in (False, True)
        for used in (False, True)
    }

    def fast(request: Request) -> list[bytes] | None:
        if request.path not in _PATHS or request.method != "POST":
            return None
        body = request.body
        stream = b'"stream":true' in body or b'"stream": true' in body
        used = stream and (b'"include_usage":true' in body or b'"include_usage": true' in body)
        return answers[request.path, stream, used]

    return fast


def _answer(model: str, chat: bool, stream: bool, used: bool) -> list[bytes]:
    kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat and stream else "")
    start = f'{{"id":"cmpl-fast","object":"{kind}","created":1,"model":"{model}","choices":['
    usage = '"usage":{"prompt_tokens":32,"total_tokens":48,"completion_tokens":16}}'
    if not stream:
        content = '"message":{"role":"assistant","content":"fast"}' if chat else '"text":"fast"'
        body = f'{start}{{"index":0,{content},"finish_reason":"stop"}}],{usage}'.encode()
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return [head(200, fields) + body]
    pieces = [head(200, "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n")]
    for i in range(CHUNKS):
        text = '"delta":{"content":" fast"}' if chat else '"text":" fast"'
        finish = '"stop"' if i == CHUNKS - 1 else "null"
        event = f'data: {start}{{"index":0,{text},"finish_reason":{finish}}}]}}\n\n'
        pieces.append(chunked(event.encode()))
    if used:
        pieces.append(chunked(f"data: {start}],{usage}\n\n".encode()))
    pieces[-1] += chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return pieces
