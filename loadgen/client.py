"""Sends one request and notes when each thing happened, as its user would see it."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

import aiohttp
import msgspec

from loadgen.answer import Answer, Failure, error_message
from loadgen.prompts import Endpoint, Request
from loadgen.sse import EventParser, EventTooLong
from shared.runtime.clock import Clock

_PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_MAX_ERROR_BYTES = 4096
_LINGER_S = 1.0
"""How long the end of a stream is waited for after its [DONE], so that the server need not count it as cut off."""

Outcome = Literal["ok", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what they have in common."""

    url: str
    model: str
    endpoint: Endpoint
    temperature: float
    ignore_eos: bool
    continuous_usage: bool
    timeout_s: float

    @property
    def address(self) -> str:
        """The URL that requests are posted to."""
        return self.url + _PATHS[self.endpoint]

    def body(self, request: Request) -> bytes:
        """Return the request as JSON."""
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if self.continuous_usage else {})
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": options,
        }
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)


@dataclass(slots=True)
class Record:
    """What became of one request. All times are seconds of one steady clock.

    `sent_s` is the moment before the client connects and sends; `intended_s` the moment its user
    wanted it sent. The difference is the load generator's own delay, and not the server's fault.
    """

    request: Request
    intended_s: float
    sent_s: float
    headers_s: float | None = None
    ended_s: float = 0.0
    answer: Answer = field(default_factory=Answer)
    failure: Failure | None = None
    cancelled: bool = False

    @property
    def outcome(self) -> Outcome:
        """How it counts. A client that leaves on purpose is neither a success nor a failure."""
        if self.failure is not None:
            return "failed"
        return "cancelled" if self.cancelled else "ok"

    @property
    def send_lag_s(self) -> float:
        """How late this client sent it."""
        return self.sent_s - self.intended_s

    @property
    def done_s(self) -> float:
        """When it was over: at [DONE] if there was one."""
        return self.ended_s if self.answer.done_s is None else self.answer.done_s


class Client:
    """Sends requests to one target."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, clock: Clock) -> None:
        self._session = session
        self._target = target
        self._clock = clock

    async def ask(self, request: Request, body: bytes, *, intended_s: float) -> Record:
        """Send one request and read its answer to the end. What goes wrong is in the record, never raised."""
        record = Record(request, intended_s, sent_s=self._clock())
        with _noting_failure(record, self._target.timeout_s):
            async with asyncio.timeout(self._target.timeout_s):
                await self._exchange(body, record)
        record.ended_s = self._clock()
        return record

    async def _exchange(self, body: bytes, record: Record) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._session.post(self._target.address, data=body, headers=headers) as response:
            record.headers_s = self._clock()
            record.failure = await _refusal(response)
            if record.failure is None:
                await self._read(response, record)

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        answer, events = record.answer, EventParser()
        while not answer.is_over and (piece := await response.content.readany()):
            now_s = self._clock()
            for data in events.feed(piece):
                answer.take(data, now_s)
            if record.request.leaves_early and answer.first_text_s is not None and not answer.is_over:
                record.cancelled = True
                response.close()
                return
        record.failure = answer.verdict()
        if record.failure is None:
            await _linger(response)


@contextmanager
def _noting_failure(record: Record, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        if record.answer.is_over:  # whole, or failed already: only its connection was still open
            return
        record.failure = Failure("timeout", f"not finished {timeout_s:g} s after it was sent")
    except EventTooLong as error:
        record.failure = Failure("bad_event", str(error))
    except (aiohttp.ClientError, OSError) as error:
        record.failure = Failure("connection", f"{type(error).__name__}: {error}")


async def _refusal(response: aiohttp.ClientResponse) -> Failure | None:
    if response.status != HTTPStatus.OK:
        body = await response.content.read(_MAX_ERROR_BYTES)
        return Failure("http", _message_in(body), response.status, response.headers.get("Retry-After"))
    if response.content_type != "text/event-stream":
        return Failure("not_a_stream", f"a stream was asked for, the answer is {response.content_type}")
    return None


def _message_in(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")[:500]
    return error_message(answer.get("error", answer) if isinstance(answer, dict) else answer)


async def _linger(response: aiohttp.ClientResponse) -> None:
    """Read on until the server ends the stream. The answer is whole and timed: nothing here can spoil it."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        response.close()
