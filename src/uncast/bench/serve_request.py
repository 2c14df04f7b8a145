"""One request to an OpenAI endpoint, timed as its client sees it.

A time is taken with `time.perf_counter` (monotonic) when bytes arrive, before they are read. A chunk counts when it holds text
of the answer, reasoning or a tool call: the opening chunk that only names the role does not, nor does one that only ends the
answer. A server may put several tokens into a chunk, or hold back a token whose character is incomplete.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MAX_EVENT_BYTES = 16 << 20
_DONE = "[DONE]"
_MOST_TOKENS = 1 << 40
"""Of one answer; a larger count is no count."""
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")
"""Of a chat chunk's `delta`: what counts as tokens. vLLM and others call reasoning differently."""


def check_sendable(value: Any, what: str) -> None:
    """Raises `ValueError` for what no body can hold: infinite numbers (`1e999` is read as one), half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise ValueError(
            f"{what} cannot be sent as JSON in UTF-8: it holds a number or character that this cannot say"
        ) from None


def printable(text: str) -> str:
    """Foreign text on one line of at most 300 characters, without control characters and halves of surrogate pairs."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split())[:300])


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
        url: http://host:port, without /v1.
        model: a name of /v1/models.
        chat: /v1/chat/completions instead of /v1/completions.
        stream: server-sent events; without them nothing is known before the end.
        api_key: sent as a bearer token.
        timeout_s: for a whole request.
        extra: more fields of every body, such as `{"ignore_eos": True}` (so named by vLLM, SGLang, llama.cpp and uncast).
    """

    url: str
    model: str
    chat: bool = False
    stream: bool = True
    api_key: str | None = None
    timeout_s: float = 300.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `ValueError` for a key, a time, or fields of a body that cannot be."""
        key = self.api_key or ""
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ValueError("api_key holds characters that an HTTP header cannot hold")
        if not 0 < self.timeout_s < 1e9:
            raise ValueError(f"timeout is {self.timeout_s:g}: seconds above 0 are needed")
        check_sendable(self.model, "model")
        check_sendable(dict(self.extra), "extra_body")

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        plain = {"Accept-Encoding": "identity"}  # a packed stream would come in lumps
        return plain | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


@dataclass(frozen=True)
class Prompt:
    """What to ask: a text, token ids (completions only) or messages (chat only), and how many tokens the answer may have."""

    content: str | Sequence[int] | Sequence[Mapping[str, Any]]
    max_tokens: int


@dataclass
class Answer:
    """What came of one request. Times are of `time.perf_counter`, in seconds.

    Attributes:
        due: when it should have been sent: latencies count from here.
        sent, end: when it was sent, and when its last byte or its failure came.
        chunks: when each chunk with tokens came.
        prompt_tokens, output_tokens, cached_tokens: of the server's `usage`; None if it gives none.
        failure: what went wrong, in words that are the same for the same fault; None if the answer is complete.
        detail: the server's or the library's own words for it.
    """

    due: float
    sent: float = 0.0
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    failure: str | None = None
    detail: str = ""

    def fail(self, kind: str, detail: str) -> None:
        """Notes that the request has failed now."""
        self.failure, self.detail, self.end = kind, printable(detail), time.perf_counter()

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, else the chunks'."""
        return len(self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Until the first chunk with tokens; None without one."""
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def e2e_s(self) -> float:
        """Until the last byte."""
        return self.end - self.due

    @property
    def tpot_s(self) -> float | None:
        """Per output token after the first, between the first and the last chunk with tokens; None below two tokens, or where
        all of them came in one chunk."""
        if self.tokens < 2 or len(self.chunks) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Between neighbouring chunks with tokens."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


class _Failed(Exception):
    """A request that failed: the kind, and details."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


class EventReader:
    """The `data` of server-sent events from bytes that arrive in any pieces; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._pieces, self._size, self._data = list[bytes](), 0, list[bytes]()

    def push(self, raw: bytes) -> list[str]:
        """The events that these bytes complete.

        Raises:
            ValueError: an event longer than `MAX_EVENT_BYTES`, or one that is not UTF-8.
        """
        events, lines = [], list[bytes]()
        self._pieces.append(raw)
        self._size += len(raw)
        if b"\n" in raw:  # a long line is joined once, not with every piece
            *lines, rest = b"".join(self._pieces).split(b"\n")
            self._pieces, self._size = [rest], len(rest)
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode())
                self._data = []
        if self._size + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events


async def ask(client: httpx.AsyncClient, endpoint: Endpoint, prompt: Prompt, due: float | None = None) -> Answer:
    """Sends one request and reads its answer; a failure is part of the result, not an exception.

    Args:
        due: when the request should have been sent; now if left out.
    """
    answer = Answer(time.perf_counter() if due is None else due)
    body = _body(endpoint, prompt)
    url = f"{endpoint.url}/v1/{'chat/completions' if endpoint.chat else 'completions'}"
    answer.sent = time.perf_counter()
    try:
        async with (
            asyncio.timeout(endpoint.timeout_s),
            client.stream("POST", url, json=body, headers=endpoint.headers) as response,
        ):
            if response.status_code != 200:
                raise _Failed(f"HTTP {response.status_code}", _message(await response.aread()))
            await (_read_stream if endpoint.stream else _read_whole)(response, answer)
    except _Failed as error:
        answer.fail(error.kind, error.detail)
    except TimeoutError:
        answer.fail("timeout", f"no complete answer within {endpoint.timeout_s:g} s")
    except httpx.ConnectError as error:
        answer.fail("no connection", str(error))
    except httpx.TransportError as error:
        answer.fail("connection lost", str(error) or type(error).__name__)
    except httpx.HTTPError as error:  # a body that is not packed as its header says
        answer.fail("broken answer", str(error) or type(error).__name__)
    return answer


def _body(endpoint: Endpoint, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": prompt.max_tokens}
    if not endpoint.chat:
        body["prompt"] = prompt.content
    elif isinstance(prompt.content, str):
        body["messages"] = [{"role": "user", "content": prompt.content}]
    else:
        body["messages"] = prompt.content
    if endpoint.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | dict(endpoint.extra)


async def _read_stream(response: httpx.Response, answer: Answer) -> None:
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise _Failed("no event stream", f"content type {kind or 'missing'}: {_message(await response.aread())}")
    reader, ended = EventReader(), False
    async for raw in response.aiter_raw():
        now = time.perf_counter()
        try:
            for event in reader.push(raw):
                ended |= event == _DONE or _take(event, answer, now)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _Failed("broken event stream", str(error)) from None
        answer.end = now
    if not ended:
        raise _Failed("stream cut short", "it ended without a finish_reason and without [DONE]")


def _take(event: str, answer: Answer, now: float) -> bool:
    """Notes one event; whether it ends the answer."""
    fields = json.loads(event)
    _check_no_error(fields)
    _note_usage(fields.get("usage"), answer)
    choices = fields.get("choices") or []
    if any(_has_tokens(choice) for choice in choices):
        answer.chunks.append(now)
    return any(choice.get("finish_reason") is not None for choice in choices)


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(name) for name in _TEXTS)


def _note_usage(usage: Mapping[str, Any] | None, answer: Answer) -> None:
    if not usage:
        return
    answer.prompt_tokens, answer.output_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    answer.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and 0 <= value < _MOST_TOKENS else None


async def _read_whole(response: httpx.Response, answer: Answer) -> None:
    raw = await response.aread()
    answer.end = time.perf_counter()
    try:
        fields = json.loads(raw)
        _check_no_error(fields)
        if not fields["choices"] or not all(isinstance(choice, dict) for choice in fields["choices"]):
            raise ValueError("an answer without choices")
        _note_usage(fields.get("usage"), answer)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _Failed("broken answer", f"{error}: {_message(raw)}") from None


def _check_no_error(fields: Mapping[str, Any]) -> None:
    """vLLM and SGLang, like uncast, send an error that comes after the status line as an event."""
    if fields.get("error") or fields.get("object") == "error":
        raise _Failed("error in the answer", _message(json.dumps(fields).encode()))


def _message(raw: bytes) -> str:
    """What an error's body says."""
    try:
        fields = json.loads(raw)
        inner = fields.get("error", fields)
        return str(inner["message"] if isinstance(inner, dict) else inner)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return raw[:300].decode("utf-8", errors="replace")
