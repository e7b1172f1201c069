"""A client that costs next to nothing: streams of one server at once, whose bytes are kept and read afterwards.

On a machine of few cores a client that parses every event takes from the server what it measures. This one notes when
each piece of an answer came; status, events and token counts are taken from the bytes when the last stream has ended.
"""

import asyncio
import http.client
import io
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadgen.sse import EventParser

_EVENT = b"data:"


class BadAnswer(Exception):
    """A server did not send what was asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What each stream of a wave asks for: random ids from a range, so that no cache of prefixes helps anybody."""

    prompt_tokens: int
    output_tokens: int
    ids: range = range(5, 40_000)

    def body(self, model: str) -> bytes:
        """Return one request as JSON: greedy, streamed, of full length."""
        return json.dumps(
            {
                "model": model,
                "prompt": random.choices(self.ids, k=self.prompt_tokens),
                "max_tokens": self.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


@dataclass(frozen=True, slots=True)
class Server:
    """Where streams are asked for."""

    host: str
    port: int
    model: str

    def post(self, body: bytes) -> bytes:
        """Return the bytes of a request, after whose answer the server is to close the connection."""
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream as its user saw it. Times are seconds of one steady clock; gaps lie between pieces with events."""

    sent_s: float
    first_s: float
    end_s: float
    tokens: int
    gaps_s: tuple[float, ...]

    @property
    def per_token_s(self) -> float:
        """Time per output token after the first."""
        return (self.end_s - self.first_s) / max(self.tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class Wave:
    """Streams that began together, and the processor time that their client took meanwhile."""

    answers: tuple[Answer, ...]
    client_cpu_s: float

    @property
    def wall_s(self) -> float:
        """From the first request to the end of the last answer."""
        return max(answer.end_s for answer in self.answers) - min(answer.sent_s for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all streams by the time that all of them took."""
        return sum(answer.tokens for answer in self.answers) / self.wall_s

    @property
    def per_token_ms(self) -> float:
        """The median stream's time per output token."""
        return statistics.median(answer.per_token_s for answer in self.answers) * 1e3

    @property
    def gap_ms(self) -> float:
        """The median time between two pieces of a stream: one step, where every step sends a token."""
        return statistics.median(gap for answer in self.answers for gap in answer.gaps_s) * 1e3

    @property
    def first_ms(self) -> float:
        """The median stream's time to its first token."""
        return statistics.median(answer.first_s - answer.sent_s for answer in self.answers) * 1e3


class _Stream(asyncio.Protocol):
    """One connection: sends its request, keeps what comes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.sent_s = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed.done():  # its wave was given up
            return
        if exc is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(exc)


class _Received:
    """Bytes that were received, as the socket that `http.client` reads an answer from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


async def wave(server: Server, asked: Asked, streams: int, *, within_s: float) -> Wave:
    """Ask for all streams at once and return when the last has ended. Raises `BadAnswer` and TimeoutError."""
    requests = [server.post(asked.body(server.model)) for _ in range(streams)]
    before_s = time.process_time()
    async with asyncio.timeout(within_s):
        streamed = await _all_streamed(server, requests)
    client_cpu_s = time.process_time() - before_s
    answers = (read_answer(stream.sent_s, stream.pieces, asked.output_tokens) for stream in streamed)
    return Wave(tuple(answers), client_cpu_s)


async def _all_streamed(server: Server, requests: Sequence[bytes]) -> list[_Stream]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_streamed(server, request)) for request in requests]
    except* OSError as errors:
        raise BadAnswer(f"a connection broke: {errors.exceptions[0]}") from errors
    return [task.result() for task in tasks]


async def _streamed(server: Server, request: bytes) -> _Stream:
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(lambda: _Stream(request), server.host, server.port)
    try:
        await stream.closed
    finally:
        transport.close()
    return stream


def read_answer(sent_s: float, pieces: Sequence[tuple[float, bytes]], wanted_tokens: int) -> Answer:
    """Return what a stream's bytes say. Raises `BadAnswer` unless it is whole and as long as was asked for."""
    events = _events(b"".join(data for _, data in pieces))
    tokens = _counted(events)
    if tokens != wanted_tokens:
        raise BadAnswer(f"{tokens} tokens where {wanted_tokens} were asked for: {events[-3:]!r}")
    times = [at for at, data in pieces if _EVENT in data]
    return Answer(sent_s, times[0], times[-1], tokens, tuple(after - before for before, after in pairwise(times)))


def _events(received: bytes) -> list[bytes]:
    response = http.client.HTTPResponse(_Received(received))  # type: ignore[arg-type]  # it asks for makefile, no more
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ValueError) as error:
        raise BadAnswer(f"not a whole HTTP answer ({error}): {received[-200:]!r}") from error
    if response.status != http.HTTPStatus.OK:
        raise BadAnswer(f"status {response.status}: {body[:500]!r}")
    events = EventParser().feed(body)
    if not events or events[-1] != b"[DONE]":
        raise BadAnswer(f"a stream without its end: {body[-200:]!r}")
    return events[:-1]


def _counted(events: Sequence[bytes]) -> int:
    """Return the number of tokens that the last event with usage states; no event of a stream is one token for sure."""
    for event in reversed(events):
        usage = json.loads(event).get("usage")
        if usage:
            return int(usage["completion_tokens"])
    raise BadAnswer(f"no event states the usage, the last is {events[-1:]!r}")
