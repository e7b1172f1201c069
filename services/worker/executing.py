"""Plans in order, one step after the other with as little between them as can be.

While a step runs the next plan is laid out and queued behind it on the same thread, so that between the two there is no
event loop. What a step came to is settled and published beside the next one::

    step thread   | step n .................. | step n+1 ................ | step n+2
    event loop      settle n-1, accept n,       settle n, accept n+1,
                    publish n-1 ... lay out n+1 publish n ... lay out n+2

The ledger still takes every plan in its turn: what was begun ahead must be what it then accepts.
"""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import structlog

from services.worker.executor import Batch, Executor
from services.worker.foresight import came_true, drawing_of, places_of
from services.worker.inbox import Inbox, Read
from services.worker.residents import Accepted, Ledger, Refused, Repeated, Settled
from services.worker.step_thread import Ran, RunningStep, StepThread
from shared.bus.port import Entry, Write
from shared.errors import ProtocolError
from shared.ids import WorkerId
from shared.protocol import names
from shared.protocol.codec import encode
from shared.protocol.messages import ClaimWorker, Message, StepFailed, StepPlan, StepResult

_ERROR_CHARACTERS = 1000

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Answer:
    """What an entry came to: published in one pipeline, after which the entry goes."""

    entry: Entry
    writes: tuple[Write, ...] = ()
    unreadable: str = ""


@dataclass(slots=True)
class Counts:
    """What happened in this life, for its last log line."""

    repeats: int = 0
    refused: int = 0
    unreadable: int = 0
    ahead: int = 0
    """Steps that were begun before their plan's turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step was begun ahead of: the turn of its plan, which comes when the step ``before`` it is settled."""

    read: Read
    before: RunningStep


@dataclass(frozen=True, slots=True)
class Begun:
    """A step on the thread, and what it computes there."""

    batch: Batch
    running: RunningStep
    ahead_of: Turn | None = None

    def is_for(self, batch: Batch) -> bool:
        """Return whether this is the step of a batch, perhaps with rows of requests that have ended meanwhile."""
        before = self.ahead_of.before.result(timeout=0).outcomes if self.ahead_of else ()
        return came_true(self.batch, before, batch)


class StepFailure(Exception):
    """A step raised; its cause is what it raised."""


@dataclass(slots=True)
class Executing:
    """The executor of one life: takes what is read, and puts an answer to each into the outbox."""

    worker: WorkerId
    ledger: Ledger
    executor: Executor
    thread: StepThread
    inbox: Inbox
    outbox: asyncio.Queue[Answer]
    counts: Counts
    _ahead: Begun | None = field(default=None, init=False)

    async def run(self) -> Literal["stopping", "step_failed"]:
        """Execute until the inbox is closed or a step raises. What was begun ahead ends with it."""
        try:
            while (read := await self._next()) is not None:
                await self._do(read)
        except StepFailure:
            return "step_failed"
        finally:
            if self._ahead is not None:
                self._ahead.running.cancel()
        return "stopping"

    async def _next(self) -> Read | None:
        """Return what comes next, first of all the plan whose step was begun; None once the inbox is closed."""
        if self._ahead is not None and self._ahead.ahead_of is not None:
            return self._ahead.ahead_of.read
        while self.inbox.head is None:
            if self.inbox.is_closed:
                return None
            await self.inbox.changed()
        return self.inbox.take()

    async def _do(self, read: Read) -> None:
        match read.message:
            case ClaimWorker() as claim:
                await self._claimed(read.entry, claim)
            case StepPlan() as plan:
                await self._planned(read, plan)
            case ProtocolError() as error:
                await self.outbox.put(Answer(read.entry, unreadable=str(error)))

    async def _claimed(self, entry: Entry, claim: ClaimWorker) -> None:
        state = self.ledger.claim(claim.nonce)
        told = {"residents": len(state.residents), "named_blocks": len(state.named)}
        log.info("worker_claimed", worker=self.worker, epoch=state.epoch, **told)
        await self._answer(entry, state)

    async def _planned(self, read: Read, plan: StepPlan) -> None:
        begun, self._ahead = self._ahead, None
        accepted = self.ledger.accept(plan)
        if begun is not None and not isinstance(accepted, Accepted):
            raise RuntimeError(f"step {plan.step} was begun ahead of its turn, in which its plan is not accepted")
        match accepted:
            case Accepted():
                await self._step(read, accepted, begun)
            case Repeated():
                self.counts.repeats += 1
                log.debug("plan_repeated", worker=self.worker, epoch=plan.epoch, step=plan.step)
                await self.outbox.put(Answer(read.entry))
            case Refused():
                self.counts.refused += 1
                log.error("plan_refused", worker=self.worker, epoch=plan.epoch, step=plan.step, why=accepted.why)
                await self._answer(read.entry, accepted.answer)

    # -- steps --------------------------------------------------------------------------------------------------

    async def _step(self, read: Read, accepted: Accepted, begun: Begun | None) -> None:
        try:
            ran = await self._run(accepted, begun)
        except Exception as error:  # whatever a step raises ends this life, and is told
            log.exception("step_failed", worker=self.worker, epoch=accepted.epoch, step=accepted.step)
            text = f"{type(error).__name__}: {error}"
            await self._answer(read.entry, StepFailed(accepted.epoch, accepted.step, text[:_ERROR_CHARACTERS]))
            raise StepFailure from error
        settled = self.ledger.settle(accepted, ran.outcomes)
        waited_s = None if ran.begun_s is None else ran.begun_s - read.at_s
        result = StepResult(accepted.epoch, accepted.step, ran.step_s, tuple(settled.rows), waited_s)
        batches = self.ledger.token_batches(settled)
        # tokens before the result: final tokens stand before the list that no longer names their request
        tokens = tuple(Write(names.tokens(gateway), encode(batch)) for gateway, batch in batches.items())
        await self.outbox.put(Answer(read.entry, (*tokens, Write(names.results(self.worker), encode(result)))))
        self._log_step(accepted, settled, ran, waited_s)

    async def _run(self, accepted: Accepted, begun: Begun | None) -> Ran:
        """Return what the step drew for the rows that were accepted. Raises whatever it raises."""
        if begun is None:
            if not accepted.batch:
                return Ran((), 0.0)
            begun = self._begin(accepted.batch)
        elif not begun.is_for(accepted.batch):
            raise RuntimeError("a step was begun ahead for another batch than its plan came to")
        ran = await self._ended(begun)
        places = places_of(begun.batch)
        outcomes = (ran.outcomes[places[row.request]] for row in accepted.batch if row.has_outcome)
        return replace(ran, outcomes=tuple(outcomes))

    async def _ended(self, begun: Begun) -> Ran:
        """Return what a step came to when it has ended, having begun the next one behind it if that could be."""
        ended = asyncio.wrap_future(begun.running)
        ended.add_done_callback(lambda _: self.inbox.wake())
        try:
            while not ended.done():
                if self._ahead is None:
                    self._look_ahead(begun)
                await self.inbox.changed()
        finally:
            ended.cancel()  # nobody asks for what it came to when this life is over
        return ended.result()

    def _look_ahead(self, begun: Begun) -> None:
        """Begin the next plan behind the step that runs, if it is here and it can be told what it will come to."""
        head = self.inbox.head
        if head is None or not isinstance(head.message, StepPlan):
            return
        batch = self.ledger.foresee(head.message, drawing_of(begun.batch))
        if batch:
            self.counts.ahead += 1
            self._ahead = self._begin(batch, Turn(self.inbox.take(), begun.running))

    def _begin(self, batch: Batch, turn: Turn | None = None) -> Begun:
        """Lay a batch out and begin it, behind what runs. What that raises counts as raised by the step."""
        try:
            step = self.executor.prepare(batch)
        except Exception as error:  # noqa: BLE001 - raised again where the step's end is waited for
            running: RunningStep = Future()
            running.set_exception(error)
        else:
            running = self.thread.begin(step, turn.before if turn else None)
        return Begun(batch, running, turn)

    def _log_step(self, accepted: Accepted, settled: Settled, ran: Ran, waited_s: float | None) -> None:
        for request, why in settled.failed.items():
            log.warning("request_failed", worker=self.worker, request=request, why=why)
        log.debug(
            "step_executed",
            worker=self.worker,
            epoch=accepted.epoch,
            step=accepted.step,
            rows=len(accepted.batch),
            tokens=sum(len(row.token_ids) for row in accepted.batch),
            drawn=sum(len(row.token_ids) for row in settled.rows),
            step_ms=round(ran.step_s * 1000, 3),
            idle_ms=round(ran.idle_s * 1000, 3),
            waited_ms=None if waited_s is None else round(waited_s * 1000, 3),
        )

    async def _answer(self, entry: Entry, message: Message) -> None:
        await self.outbox.put(Answer(entry, (Write(names.results(self.worker), encode(message)),)))
