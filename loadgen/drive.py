"""Sends the load: at given moments whatever the server does (open loop), or as many at a time (closed loop)."""

import asyncio
from collections.abc import Iterable, Iterator

from loadgen.client import Client, Record, Target
from loadgen.prompts import Request
from shared.runtime.clock import Clock


class Load:
    """Sends requests and keeps what became of them, so that a run cut short still has what finished."""

    def __init__(self, client: Client, target: Target, clock: Clock) -> None:
        self._client = client
        self._target = target
        self._clock = clock
        self.start_s = clock()
        self.sent = 0
        self.failed = 0
        self.output_tokens = 0
        self.records: list[Record] = []

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet over."""
        return self.sent - len(self.records)

    async def open_loop(self, requests: Iterator[Request], arrivals_s: Iterable[float]) -> None:
        """Send one request at each arrival, in seconds from now; return when all are over."""
        self.start_s = self._clock()
        async with asyncio.TaskGroup() as users:
            for arrival_s, request in zip(arrivals_s, requests, strict=False):
                body = self._target.body(request)  # made before its moment has come, so as not to delay it
                intended_s = self.start_s + arrival_s
                await asyncio.sleep(max(0.0, intended_s - self._clock()))
                users.create_task(self._ask(request, body, intended_s))

    async def closed_loop(self, requests: Iterator[Request], *, concurrency: int, duration_s: float) -> None:
        """Keep `concurrency` requests running until there are no more or the time is up; finish those sent."""
        self.start_s = self._clock()
        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(self._user(requests, self.start_s + duration_s))

    async def _user(self, requests: Iterator[Request], ends_s: float) -> None:
        for request in requests:
            body = self._target.body(request)
            now_s = self._clock()
            if now_s >= ends_s:
                return
            await self._ask(request, body, now_s)

    async def _ask(self, request: Request, body: bytes, intended_s: float) -> None:
        self.sent += 1
        record = await self._client.ask(request, body, intended_s=intended_s)
        self.records.append(record)
        self.failed += record.outcome == "failed"
        self.output_tokens += record.answer.usage.completion_tokens if record.answer.usage else 0
