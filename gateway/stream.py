"""Server-sent events on their way from engine to client: bytes in, bytes out, no sockets.

Only whole events are passed on, so that a stream that breaks can be closed with a well-formed
error. Bytes are not changed, but for the usage chunk that we asked for and the client did not,
and for fields a client may not see.
"""

import re

import msgspec

from gateway.openai import KV_FIELDS

MAX_EVENT_BYTES = 32 * 1024 * 1024
_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class BrokenStream(ValueError):
    """The engine sent something that is no event stream, or an event beyond all bounds."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the engine counted, in tokens. ``cached_tokens`` is None where it does not tell."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Answer(msgspec.Struct):
    usage: Usage | None = None
    choices: list[msgspec.Raw] = []


_answers = msgspec.json.Decoder(_Answer)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Relay:
    """One stream. ``strip_usage`` takes out the chunk that holds only usage; ``private`` hides
    cached-token counts."""

    def __init__(self, *, strip_usage: bool, private: bool) -> None:
        self.usage: Usage | None = None
        self._strip, self._private = strip_usage, private
        self._tail = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that may go to the client now. Raises BrokenStream."""
        tail = self._tail
        unseen = max(0, len(tail) - 3)  # a boundary is at most four bytes long
        tail += chunk
        ends = [boundary.end() for boundary in _BOUNDARY.finditer(tail, unseen)]
        if not ends:
            if len(tail) > MAX_EVENT_BYTES:
                raise BrokenStream(f"an event of more than {MAX_EVENT_BYTES} bytes")
            return b""
        data = bytes(tail[: ends[-1]])
        del tail[: ends[-1]]
        if not _interesting(data):
            return data
        starts = [0, *ends[:-1]]
        return b"".join(self._event(data[start:end]) for start, end in zip(starts, ends, strict=True))

    def end(self) -> bytes:
        """What a stream that ended well still owes."""
        rest = bytes(self._tail)
        self._tail.clear()
        return self._event(rest) if rest else b""

    def _event(self, event: bytes) -> bytes:
        if not _interesting(event):
            return event
        start = event.find(b"{")
        if start < 0:
            return event
        payload = event[start:].rstrip()
        try:
            answer = _answers.decode(payload)
        except msgspec.DecodeError:
            # Not for us to judge, the client sees what the engine said; but not where it may hide a count.
            return b"" if self._private else event
        if answer.usage is not None:
            self.usage = answer.usage
            if self._strip and not answer.choices:
                return b""
        cleaned = clean_answer(payload, private=self._private)
        return event if cleaned is payload else event[:start] + cleaned + b"\n\n"


def _interesting(data: bytes) -> bool:
    """Whether these events may hold usage, or what clients may not see."""
    return b'"usage"' in data or b"_transfer_params" in data


def read_usage(body: bytes) -> Usage | None:
    """The usage of a whole answer, None where there is none."""
    try:
        return _answers.decode(body).usage
    except msgspec.DecodeError:
        return None


def clean_answer(payload: bytes, *, private: bool) -> bytes:
    """A JSON answer without what clients may not see: what a KV connector says, and with ``private``
    the cached-token count. The same object when there was nothing to take out. With ``private``
    raises BrokenStream for an answer that cannot be read."""
    if b"_transfer_params" not in payload and not (private and b"prompt_tokens_details" in payload):
        return payload
    try:
        members = _members.decode(payload)
        usage = members.get("usage")
        counts = _members.decode(usage) if private and usage is not None and bytes(usage) != b"null" else {}
    except msgspec.DecodeError as error:
        if private:
            raise BrokenStream(f"its answer cannot be read: {error}") from error
        return payload
    steering = [name for name in KV_FIELDS if bytes(members.get(name, b"null")) != b"null"]
    for name in steering:
        del members[name]
    if "prompt_tokens_details" in counts:
        counts["prompt_tokens_details"] = msgspec.Raw(b"null")
        members["usage"] = msgspec.Raw(msgspec.json.encode(counts))
    elif not steering:
        return payload
    return msgspec.json.encode(members)


def error_event(body: bytes) -> bytes:
    """An error in OpenAI's form as the last event of a stream."""
    return b"data: " + body + b"\n\n"
