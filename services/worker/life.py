"""One life of a worker: from its registration under an id until it stops, fails a step, or is declared dead.

Three tasks pass entries on through short queues, so that reading and publishing run beside the step:
``reader -> inbox -> executor -> outbox -> writer``. All writes leave in one order, one at a time.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Literal

import structlog

from services.worker.executing import Answer, Counts, Executing
from services.worker.executor import Executor
from services.worker.hung_step import HungStep
from services.worker.inbox import Inbox, Read
from services.worker.patience import patiently, unless_stopped
from services.worker.residents import Ledger
from services.worker.step_thread import StepThread
from shared.bus.port import Bus, Entry, Part
from shared.errors import BusUnavailable, ProtocolError
from shared.ids import START, WorkerId
from shared.protocol.codec import decode
from shared.protocol.messages import ClaimWorker, StepPlan
from shared.runtime.part import keep_beating

_READ_BLOCK_S = 5.0
_INBOX = 8
"""Plans read ahead; a leader keeps at most plan_depth + 1 in flight, so this is never full for long."""
_OUTBOX = 4
FLUSH_S = 5.0
"""How long a stopping worker goes on trying to publish its last step."""

log = structlog.get_logger()

Ended = Literal["stopping", "step_failed", "declared_dead"]


@dataclass(frozen=True, slots=True)
class Workplace:
    """What a life works with; all of it outlives the life."""

    bus: Bus
    executor: Executor
    thread: StepThread
    hung_step: HungStep
    flush_s: float = FLUSH_S


class Life:
    """Executes the plans of one worker id in order, and answers every one."""

    def __init__(self, workplace: Workplace, part: Part, ledger: Ledger) -> None:
        self._bus = workplace.bus
        self._clock = workplace.thread.clock
        self._executor = workplace.executor
        self._flush_s = workplace.flush_s
        self._part = part
        self._plans, self._results = part.streams
        self._inbox = Inbox(_INBOX)
        self._outbox: asyncio.Queue[Answer] = asyncio.Queue(_OUTBOX)
        self._kinds_logged: set[str] = set()
        self._publishing: asyncio.Timeout | None = None
        self._give_up_at_s: float | None = None  # a write is tried again for ever, until the process stops
        self.counts = Counts()
        means = (ledger, workplace.executor, workplace.thread)
        self._executing = Executing(WorkerId(part.id), *means, self._inbox, self._outbox, self.counts)

    async def run(self, registration: bytes, stopping: asyncio.Event) -> Ended:
        """Register, then execute plans until ``stopping`` or a step raises. `DeclaredDead` comes in a group."""
        if not await unless_stopped(stopping, self._make_streams()):
            return "stopping"
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(keep_beating(self._bus, self._part, registration))
            reading = tasks.create_task(self._read())
            watching = tasks.create_task(self._close_inbox(stopping, reading))
            writing = tasks.create_task(self._write())
            ended = await self._executing.run()
            await self._outbox.join()
            for task in (beating, reading, watching, writing):
                task.cancel()
        return ended

    async def _make_streams(self) -> None:
        """Make both streams before the first beat names this worker, so that no claim and no answer is lost."""
        for stream in (self._plans, self._results):
            await patiently(partial(self._bus.make_stream, stream), "stream_not_made")

    async def _read(self) -> None:
        cursor = START
        while True:
            reading = partial(self._bus.read, {self._plans: cursor}, block_s=_READ_BLOCK_S)
            entries = await patiently(reading, "plans_not_read")
            for entry in entries:
                await self._inbox.put(Read(entry, self._readable(entry), self._clock()))
                cursor = entry.id

    async def _close_inbox(self, stopping: asyncio.Event, reading: asyncio.Task[None]) -> None:
        """Once ``stopping``: what has been read but not begun stays undone, the running step ends as usual."""
        await stopping.wait()
        self._give_up_at_s = asyncio.get_running_loop().time() + self._flush_s
        if self._publishing is not None:
            self._publishing.reschedule(self._give_up_at_s)
        reading.cancel()
        self._inbox.close()

    def _readable(self, entry: Entry) -> ClaimWorker | StepPlan | ProtocolError:
        try:
            message = decode(entry.data)
        except ProtocolError as error:
            return self._unreadable("undecodable", error)
        if isinstance(message, StepPlan):
            for new in message.new:
                if new.submit.sampling.grammar:
                    self._executor.expect(new.submit.sampling.grammar)
        if isinstance(message, ClaimWorker | StepPlan):
            return message
        kind = type(message).__name__
        return self._unreadable(kind, ProtocolError(f"a {kind} is not for a worker"))

    def _unreadable(self, kind: str, error: ProtocolError) -> ProtocolError:
        self.counts.unreadable += 1
        if kind not in self._kinds_logged:
            self._kinds_logged.add(kind)
            log.error("plan_unreadable", worker=self._part.id, kind=kind, error=str(error))
        return error

    async def _write(self) -> None:
        while True:
            answer = await self._outbox.get()
            try:
                async with asyncio.timeout_at(self._give_up_at_s) as self._publishing:
                    # a repeated attempt carries the same positions: readers drop what they have
                    await patiently(partial(self._publish, answer), "answer_not_published")
            except TimeoutError:
                log.exception("answer_given_up", worker=self._part.id)
            self._publishing = None
            self._outbox.task_done()

    async def _publish(self, answer: Answer) -> None:
        if answer.unreadable:
            await self._bus.dead_letter(answer.entry, answer.unreadable)
        if answer.writes:
            await self._bus.publish(answer.writes, trim=(self._plans, answer.entry.id))
        else:
            await self._bus.trim(self._plans, answer.entry.id)


async def leave(bus: Bus, part: Part) -> None:
    """Take the part off the list; if Redis does not answer, its beat runs out by itself."""
    try:
        await bus.leave(part)
    except BusUnavailable as error:
        log.warning("not_taken_off_the_list", part=part.id, error=str(error))
