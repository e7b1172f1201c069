"""A flood beside streams that run: who is served, who is refused and how fast, and what the streams feel of it.

Readers and flood are processes of their own, so that nobody's thread is in another's way. When a token came is the
system's word (SO_TIMESTAMPNS): the moment at which the gateway's bytes reached the socket, whenever they were read.
How long a refusal took is the gateway's: from its reading of the request to its answer, in its log.
"""

import asyncio
import json
import multiprocessing
import re
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from tests.end_to_end.served import MODEL, eventually, nothing_is_left
from tests.integration.processes import Up

WITHIN_S = 120.0
_STAMPED = 35
"""SO_TIMESTAMPNS, which Python does not name."""
_STAMP = struct.Struct("ll")
RESET = 0
"""Stands for the status of who got none."""


@dataclass(frozen=True)
class Size:
    """How many streams run, how many requests come at once, and how long each is."""

    streams: int
    stream_tokens: int
    requests: int
    tokens: int = 20
    quiet_s: float = 3.0
    """The streams run by themselves for so long, before the flood."""
    is_connected: bool = False
    """Whether the flood's connections are there before it, or come with it."""


@dataclass(frozen=True)
class Flooded:
    """What became of a flood, and of the streams beside it; times in ms."""

    statuses: Counter[int]
    refusals_ms: list[float]
    quiet_gaps_ms: list[float]
    flood_gaps_ms: list[float]
    """Between the first request and the last refusal."""
    later_gaps_ms: list[float]
    """From there to the last answer."""
    stream_tokens: list[int]
    lasted_s: float
    """From the first request to the last refusal."""

    def __str__(self) -> str:
        served = ", ".join(f"{count} x {status or 'reset'}" for status, count in sorted(self.statuses.items()))
        return (
            f"{served}; longest refusal from being read {max(self.refusals_ms):.1f} ms, all within "
            f"{self.lasted_s * 1000:.0f} ms; gap between tokens of {len(self.stream_tokens)} streams, P99 (longest): "
            f"before {_told(self.quiet_gaps_ms)}, until the last refusal {_told(self.flood_gaps_ms)}, "
            f"until the last answer {_told(self.later_gaps_ms)} ms"
        )


def p99(values: Sequence[float]) -> float:
    """Return the value that a hundredth of all exceed."""
    return sorted(values)[int(len(values) * 0.99)]


def _told(gaps_ms: Sequence[float]) -> str:
    return f"{p99(gaps_ms):.1f} ({max(gaps_ms):.1f})"


async def flood_beside_streams(up: Up, size: Size) -> Flooded:
    """Let streams run for a while, flood, and return when all is over and nothing is left."""
    refused_before = len(up.events("request_refused"))
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        streaming = loop.run_in_executor(processes, read_streams, up.address, size)
        await eventually(lambda found: found["slipstream_requests_running"] == size.streams, up)
        await asyncio.sleep(size.quiet_s)
        answered = await loop.run_in_executor(processes, flood, up.address, size)
        streams = await streaming
    await eventually(nothing_is_left, up)
    began_s = min(one.sent_s for one in answered)
    refused_s = max(one.answered_s for one in answered if one.status != 200)
    ended_s = max(one.answered_s for one in answered)

    def gaps_ms(begin_s: float, end_s: float) -> list[float]:
        gaps = (pair for stream in streams for pair in pairwise(stream.moments_s))
        return [(after - before) * 1000 for before, after in gaps if after > begin_s and before < end_s]

    return Flooded(
        statuses=Counter(one.status for one in answered),
        refusals_ms=[event["took_ms"] for event in up.events("request_refused")[refused_before:]],
        quiet_gaps_ms=gaps_ms(began_s - size.quiet_s / 2, began_s - 0.1),
        flood_gaps_ms=gaps_ms(began_s, refused_s),
        later_gaps_ms=gaps_ms(refused_s, ended_s),
        stream_tokens=[stream.tokens for stream in streams],
        lasted_s=refused_s - began_s,
    )


def _posted(address: tuple[str, int], **fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "ignore_eos": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


@dataclass(slots=True)
class Streamed:
    """One stream: when each event with tokens came, by the system's clock, and all that came."""

    moments_s: list[float] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)

    @property
    def tokens(self) -> int:
        """Tokens by the usage at its end; an event has several where the gateway was late."""
        found = re.findall(rb'"completion_tokens":(\d+)', self.received)
        return int(found[-1]) if found else 0

    def take(self, data: bytes, came_s: float) -> None:
        """Take the next bytes."""
        self.received += data
        self.moments_s += [came_s] * data.count(b'"token_logprobs"')


def read_streams(address: tuple[str, int], size: Size) -> list[Streamed]:
    """Read streams to their end."""
    streams: dict[socket.socket, Streamed] = {}
    with selectors.DefaultSelector() as selector:
        for number in range(size.streams):
            connection = _stream(address, number, size.stream_tokens)
            streams[connection] = Streamed()
            selector.register(connection, selectors.EVENT_READ)
        deadline_s = _now_s() + WITHIN_S
        for connection in _readable(selector):
            assert _now_s() < deadline_s, "the streams do not end"
            data, said, *_ = connection.recvmsg(1 << 16, 64)
            stamps = [_STAMP.unpack(value[: _STAMP.size]) for _, kind, value in said if kind == _STAMPED]
            streams[connection].take(data, stamps[0][0] + stamps[0][1] * 1e-9 if stamps else _now_s())
            if not data or b"[DONE]" in data:
                selector.unregister(connection)
                connection.close()
    return list(streams.values())


def _readable(selector: selectors.BaseSelector) -> Iterator[socket.socket]:
    while selector.get_map():
        for key, _ in selector.select(1.0):
            assert isinstance(key.fileobj, socket.socket)
            yield key.fileobj


def _stream(address: tuple[str, int], number: int, tokens: int) -> socket.socket:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.SOL_SOCKET, _STAMPED, 1)
    # with logprobs there is an event for each token, even if it is no text
    asked = {"prompt": f"n {number}", "max_tokens": tokens, "stream": True, "logprobs": 0}
    connection.sendall(_posted(address, **asked, stream_options={"include_usage": True}))
    connection.setblocking(False)
    return connection


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME)  # the clock of the stamps


@dataclass(slots=True)
class Asked:
    """One request of a flood."""

    status: int = RESET
    sent_s: float = 0.0
    answered_s: float = 0.0


class _Asking(asyncio.Protocol):
    """Sends one request, and takes nothing but the status and the end of its answer from what comes."""

    def __init__(self, request: bytes) -> None:
        self.asked = Asked()
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self) -> None:
        assert self._transport is not None
        self.asked.sent_s = _now_s()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length:")]
        if lengths and len(body) == int(lengths[0]):
            self.asked.status = int(head.split()[1])
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the port's signature
        self._end()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        if not self.is_over.done():
            self.asked.answered_s = _now_s()
            self.is_over.set_result(None)


def flood(address: tuple[str, int], size: Size) -> list[Asked]:
    """Send all requests at once and return what became of each."""
    return asyncio.run(_flood(address, size))


async def _flood(address: tuple[str, int], size: Size) -> list[Asked]:
    loop = asyncio.get_running_loop()
    made: Callable[[], _Asking] = lambda: _Asking(_posted(address, prompt="x", max_tokens=size.tokens))  # noqa: E731

    async def connect() -> _Asking:
        _, asking = await loop.create_connection(made, *address)
        if not size.is_connected:
            asking.ask()
        return asking

    async with asyncio.timeout(WITHIN_S):
        crowd = await asyncio.gather(*(connect() for _ in range(size.requests)))
        if size.is_connected:
            for asking in crowd:
                asking.ask()
        for asking in crowd:
            await asking.is_over
    for asking in crowd:
        asking.close()
    return [asking.asked for asking in crowd]
