"""One leader's turn: from the moment it has the lease until it loses it. Reads, lets the leader decide, publishes."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from services.scheduler.leader import Leader
from services.scheduler.line import Line
from services.scheduler.outbox import Outbox
from services.scheduler.reading import Reading
from shared.bus.port import EXPIRY_S, LEASE_S, RENEWAL_S, Bus, Entry, Lease
from shared.errors import BusUnavailable, LeaseLost, ProtocolError
from shared.ids import START, EntryId, WorkerId
from shared.paging.reservation import KV_MANAGERS
from shared.protocol import names
from shared.protocol.codec import decode
from shared.protocol.messages import (
    CancelRequest,
    PlanRefused,
    StepFailed,
    StepResult,
    SubmitRequest,
    WorkerState,
)
from shared.runtime.clock import Clock, until_next
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES

HELD_S = 1.0
POLL_S = 1.0
"""How often the leader looks who lives. A death is noticed at most so long after the beat has run out."""
FIRST_POLL_S = 0.5
"""The same while no worker is known: somebody may be waiting for the first."""
RETRY_S = 0.1

_T = TypeVar("_T")

log = structlog.get_logger()


class Every:
    """A duty that recurs: due at once, and then a period after it was last done."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self.due_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time."""
        return now_s >= self.due_s

    def done(self, now_s: float, *, next_s: float | None = None) -> None:
        """Begin the next period, for once of another length if one is given."""
        self.due_s = now_s + until_next(next_s or self._period_s, now_s)


@dataclass(slots=True)
class Outages:
    """Until when parts may have been unable to beat, though alive. Outlives a leader's turn, which an outage ends."""

    over_at_s: float = 0.0

    def notice(self, now_s: float) -> None:
        """Redis did not answer just now: give everyone one expiry to be heard of again."""
        self.over_at_s = now_s + EXPIRY_S


def planner_of(settings: SchedulerSettings) -> Planner:
    """Return a planner as the settings say."""
    limits = Limits(
        settings.max_num_batched_tokens,
        settings.sequences,
        long_prefill_tokens=settings.long_prefill_cap,
        tile_tokens=settings.tile_tokens,
    )
    return Planner(POLICIES[settings.policy], limits, KV_MANAGERS[settings.kv_manager], ORDERS[settings.queue]())


class Leading:
    """The shell around a `Leader`: one task reads, this one applies, plans, publishes and keeps the lease."""

    def __init__(self, bus: Bus, settings: SchedulerSettings, lease: Lease, clock: Clock, outages: Outages) -> None:
        self._bus, self._lease, self._clock, self._outages = bus, lease, clock, outages
        self._model = settings.model_name
        self._requests = names.requests(self._model)
        planner = planner_of(settings)
        outbox = Outbox(self._requests)
        line = Line(planner, outbox, settings.max_model_len, settings.prefix_cache == "on")
        self._leader = Leader(planner, line, outbox, settings.plan_depth, lambda: secrets.token_hex(8))
        self._reading = Reading(bus)
        self._read_to = START
        """The last entry of ``requests`` that was applied."""
        self._reads_requests = False
        self._first_workers: set[WorkerId] | None = None
        self._gateways: frozenset[str] = frozenset()
        self._renewed_s = clock()
        self._renewal, self._poll, self._held = Every(RENEWAL_S), Every(POLL_S), Every(HELD_S)
        self._trims = Every(HELD_S)

    async def run(self) -> None:
        """Lead until cancelled. Raises LeaseLost, in a group, when somebody else may lead."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reading.run())
            tasks.create_task(self._act())

    async def _act(self) -> None:
        while True:
            await self._duties()
            self._leader.make_plans(self._clock())
            await self._publish()
            for entry in await self._next_entries():
                await self._apply(entry)

    async def _next_entries(self) -> list[Entry]:
        """Return what has been read, waiting for the first until some duty or plan is due."""
        moments = [self._renewal.due_s, self._poll.due_s, self._held.due_s, self._leader.next_plan_at()]
        wait_s = min(moment for moment in moments if moment is not None) - self._clock()
        entries = []
        queue = self._reading.entries
        if queue.empty() and wait_s > 0:
            try:
                # not asyncio.wait_for: in 3.11 it swallows a cancellation that comes together with an entry
                async with asyncio.timeout(wait_s):
                    entries.append(await queue.get())
            except TimeoutError:
                return []
        while not queue.empty():
            entries.append(queue.get_nowait())
        return entries

    # -- duties -------------------------------------------------------------------------------------------------

    async def _duties(self) -> None:
        if self._renewal.is_due(self._clock()):
            await self._renew()
        if self._poll.is_due(self._clock()):
            await self._look_around()
            self._poll.done(self._clock(), next_s=None if self._leader.commands else FIRST_POLL_S)
        if self._held.is_due(self._clock()) or self._leader.held_is_due:
            await self._say_held()
            self._held.done(self._clock())

    async def _renew(self) -> None:
        """Keep the lease. If it is gone, all here is stale: somebody else led, or the server has come back empty."""
        if self._clock() - self._renewed_s > LEASE_S:
            raise LeaseLost(f"{self._lease.owner} did not renew its lease in time")
        started_s = self._clock()
        if not await self._patiently(lambda: self._bus.keep_lease(self._lease)):
            raise LeaseLost(f"{self._lease.owner} leads no more")
        self._renewed_s = started_s
        self._renewal.done(self._clock())

    async def _look_around(self) -> None:
        """Claim who is new, lose who is gone, and begin to read the waiting line once it is known who holds what."""
        noticed = self._leader.line.known.noticed
        sets = (names.members("worker", self._model), names.members("gateway", self._model))
        workers, gateways = await self._patiently(lambda: self._bus.parts_of_each(*sets))
        self._gateways = frozenset(gateways)
        now_s = self._clock()
        self._give_up(frozenset(workers), noticed, now_s)
        for worker in map(WorkerId, workers):
            if worker not in self._leader.commands and worker not in self._leader.given_up:
                self._reading.follow(names.results(worker))
                self._leader.claim(worker, now_s)
        self._leader.given_up.intersection_update(map(WorkerId, workers))
        if self._first_workers is None:
            self._first_workers = set(self._leader.commands)
        self._leader.refuse_if_without_worker(now_s)
        self._read_requests_if_known_who_holds_what()

    def _give_up(self, workers: frozenset[str], noticed: int, now_s: float) -> None:
        """Lose who has not beaten or not answered. Beats are not trusted for a while after an outage."""
        dead: dict[WorkerId, str] = dict.fromkeys(self._leader.overdue(now_s), "it does not answer")
        if now_s >= self._outages.over_at_s:
            gone = [worker for worker in self._leader.commands if worker not in workers]
            dead |= dict.fromkeys(gone, "its heart stopped")
            self._leader.lose_gateways(self._gateways, noticed)
        for worker, why in dead.items():
            self._leader.lose_worker(worker, why)
        self._reading.follow_only({self._requests, *map(names.results, self._leader.commands)})

    def _read_requests_if_known_who_holds_what(self) -> None:
        if self._reads_requests or self._first_workers is None or self._clock() < self._outages.over_at_s:
            return
        open_claims = (w for w in self._first_workers if w in self._leader.commands)
        if all(self._leader.commands[worker].is_claimed for worker in open_claims):
            self._reads_requests = True
            self._reading.follow(self._requests)

    async def _say_held(self) -> None:
        read_to = None
        if self._reads_requests and self._leader.all_have_answered:
            read_to = await self._patiently(lambda: self._bus.read_end(self._requests, self._read_to))
        self._leader.say_held(self._gateways, read_to)

    # -- entries ------------------------------------------------------------------------------------------------

    async def _apply(self, entry: Entry) -> None:
        try:
            message = decode(entry.data)
        except ProtocolError as error:
            await self._put_aside(entry, str(error))
        else:
            match message:
                case SubmitRequest() if entry.stream == self._requests:
                    self._leader.read_submission(entry.id, message)
                case CancelRequest() if entry.stream == self._requests:
                    self._leader.read_cancellation(entry.id, message)
                case WorkerState() | StepResult() | StepFailed() | PlanRefused() if entry.stream != self._requests:
                    self._leader.hear(self._worker_of(entry.stream), message, self._clock())
                    self._read_requests_if_known_who_holds_what()
                case _:
                    await self._put_aside(entry, f"a {type(message).__name__} has no place in this stream")
        self._count_as_applied(entry)

    def _count_as_applied(self, entry: Entry) -> None:
        if entry.stream == self._requests:
            self._read_to = EntryId(entry.id)
        else:
            self._leader.outbox.applied(entry.stream, entry.id)

    @staticmethod
    def _worker_of(stream: str) -> WorkerId:
        return WorkerId(stream.removeprefix(names.results(WorkerId(""))))

    async def _put_aside(self, entry: Entry, error: str) -> None:
        log.warning("dead_letter", stream=entry.stream, entry=entry.id, error=error)
        await self._patiently(lambda: self._bus.dead_letter(entry, error))
        if entry.stream == self._requests:
            self._leader.outbox.settle([entry.id])

    async def _publish(self) -> None:
        # Results that were applied are trimmed with the next plan: else each step would have a second write for that.
        write = self._leader.outbox.take(may_trim_only=self._trims.is_due(self._clock()))
        if write is not None:
            self._trims.done(self._clock())
            await self._patiently(lambda: self._bus.lead(self._lease, write))

    async def _patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a call until Redis answers: all of them may come twice. Raises LeaseLost once the lease has run out.

        After an outage beats are not trusted for one expiry: others could not beat either.
        """
        while True:
            try:
                return await call()
            except BusUnavailable as error:
                log.warning("bus_unavailable", error=str(error))
                self._outages.notice(self._clock())
                if self._clock() - self._renewed_s > LEASE_S:
                    raise LeaseLost(f"{self._lease.owner} could not renew its lease: {error}") from error
                await asyncio.sleep(RETRY_S)
