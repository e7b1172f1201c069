"""The leader of a model, without I/O: it takes what was read and gathers what is to be published (DESIGN §4)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import assert_never

import structlog

from services.scheduler.command import Command, FromWorker
from services.scheduler.known import KnownRequests
from services.scheduler.outbox import Outbox
from services.scheduler.report import NO_WORKER_S, no_worker, report_of, too_long
from services.scheduler.wire import outcomes_of, plan_of, request_of, request_of_resident
from shared.ids import EntryId, GatewayId, RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.protocol import names
from shared.protocol.messages import (
    CancelRequest,
    ClaimWorker,
    Held,
    HeldRequest,
    PlanRefused,
    Resident,
    StepFailed,
    StepResult,
    SubmitRequest,
    WorkerState,
)
from shared.scheduling.planner import Planner
from shared.scheduling.state import WorkerView
from shared.scheduling.timing import plan_at

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pace:
    """How far ahead plans are made, and the longest sequence that is served whatever the workers could hold."""

    plan_depth: int
    max_model_len: int | None


@dataclass(slots=True)
class Leader:
    """Soft state of one leader: lost with it, and rebuilt from ``requests`` and the workers' answers."""

    planner: Planner
    pace: Pace
    outbox: Outbox
    draw_nonce: Callable[[], str]
    known: KnownRequests = field(default_factory=KnownRequests)
    commands: dict[WorkerId, Command] = field(default_factory=dict)
    length_served: int = 0
    """Stays as it was while there is no worker; 0 before the first."""
    held_is_due: bool = False
    """Something was lost: the gateways should hear of it at once."""
    without_worker_since_s: float | None = None
    _ended: dict[RequestId, int] = field(default_factory=dict)
    """Attempts that had ended before this leader came, and whose submission it has not read yet."""

    # -- workers ------------------------------------------------------------------------------------------------

    def claim(self, worker: WorkerId, now_s: float) -> None:
        """Ask a worker for all it holds; it is commanded from its answer on."""
        nonce = self.draw_nonce()
        command = self.commands.get(worker)
        if command is None:
            self.commands[worker] = Command(worker, nonce, now_s)
        else:
            command.reclaim(nonce, now_s)
        self.outbox.say(names.plans(worker), ClaimWorker(nonce))

    @property
    def all_have_answered(self) -> bool:
        """True if no claim is open: only then is it known who holds what."""
        return all(command.is_claimed for command in self.commands.values())

    def lose_worker(self, worker: WorkerId, why: str) -> None:
        """Give a worker up with all that is resident there: the gateways that owe it will submit it again."""
        lost = self.planner.drop_worker(worker)
        command = self.commands.pop(worker, None)
        for request in lost:
            self.outbox.settle(self.known.forget(request))
        if command is not None:
            self.outbox.settle(command.cancels)
        self.held_is_due = True
        self._wake()
        log.warning("worker_lost", worker=worker, why=why, lost=len(lost))

    def overdue(self, now_s: float) -> list[WorkerId]:
        """Return the workers that have not answered a claim or plan for so long that they must be dead."""
        return [command.worker for command in self.commands.values() if command.is_overdue(now_s)]

    def hear(self, worker: WorkerId, message: FromWorker, now_s: float) -> None:
        """Apply what a worker said. What an older epoch said, or what nobody asked for, changes nothing."""
        command = self.commands.get(worker)
        if command is None or not command.awaits(message):
            return
        self._wake()
        match message:
            case WorkerState():
                self._take_over(command, message, now_s)
            case StepResult():
                self._apply_result(command, message, now_s)
            case StepFailed():
                self.lose_worker(worker, f"step {message.step} raised: {message.error}")
            case PlanRefused():
                log.warning("plan_refused", worker=worker, expected=message.expected, got=message.got)
                self._forget_view(command)
                self.claim(worker, now_s)
            case _:
                assert_never(message)

    def _forget_view(self, command: Command) -> None:
        """Drop what is believed of a worker without calling it lost: its answer will say what it holds."""
        for request in self.planner.drop_worker(command.worker):
            self.outbox.settle(self.known.forget(request))

    def _take_over(self, command: Command, state: WorkerState, now_s: float) -> None:
        command.claimed(state.epoch, now_s)
        pool = BlockPool(state.size.blocks, state.size.block_tokens)
        view = WorkerView(state.worker, pool, state.size.max_model_len)
        self.planner.add_worker(view)
        for resident in state.residents:
            self._adopt(view, resident)
        self.without_worker_since_s = None
        self.length_served = self._length_served()
        self._refuse_too_long()
        self.held_is_due = True
        log.info("worker_claimed", worker=state.worker, epoch=state.epoch, residents=len(state.residents))

    def _adopt(self, view: WorkerView, resident: Resident) -> None:
        request, attempt = resident.submit.request, resident.submit.attempt
        if resident.finish is not None:
            self._ended[request] = attempt
            view.to_release.append(request)
            return
        known = self.known.get(request)
        if known is not None:
            held = self.planner.state.requests[request]
            if known.submit.attempt > attempt or held.worker is not None:
                view.to_release.append(request)
                return
            self._end(request)
        try:
            self.planner.adopt(view, request_of_resident(resident))
        except ValueError as error:
            log.warning("resident_not_adopted", worker=view.id, request=request, error=str(error))
            view.to_release.append(request)
            return
        self.known.add(resident.submit, resident.arrival, None)

    def _apply_result(self, command: Command, result: StepResult, now_s: float) -> None:
        view = self.planner.state.workers[command.worker]
        command.times.learn(view.in_flight[0], result.step_s)
        command.answered(now_s)
        for row in result.rows:
            self.outbox.settle(self.known.settled(row.request))
        ended = self.planner.settle(command.worker, outcomes_of(result))
        for request in ended:
            self.outbox.settle(self.known.forget(request))
        log.debug("result", worker=command.worker, epoch=result.epoch, step=result.step, ended=list(ended))

    def _length_served(self) -> int:
        longest = self.planner.state.length_served or self.length_served
        return min(longest, self.pace.max_model_len or longest)

    # -- the waiting line ---------------------------------------------------------------------------------------

    def read_submission(self, entry: EntryId, submit: SubmitRequest, now_s: float) -> None:
        """Let a request wait, unless it is a copy, superseded, ended, or longer than anything that is served."""
        self._wake()
        if self._is_old_news(submit):
            self.outbox.settle([entry])
            return
        if self.known.get(submit.request) is not None:
            self._end(submit.request)
        if self._is_too_long(submit):
            self.outbox.say(names.tokens(submit.gateway), too_long(submit, self.length_served))
            self.outbox.settle([entry])
            return
        arrival = submit.arrival or entry
        self.known.add(submit, arrival, entry)
        self.planner.submit(request_of(submit, arrival))
        log.debug("submitted", request=submit.request, attempt=submit.attempt)
        if not self.commands and self.without_worker_since_s is None:
            self.without_worker_since_s = now_s

    def read_cancellation(self, entry: EntryId, cancel: CancelRequest) -> None:
        """End this attempt of a request and those below; the entry goes with the plan that tells the worker."""
        known = self.known.get(cancel.request)
        if known is None or known.submit.attempt > cancel.attempt:
            self.outbox.settle([entry])
            return
        self._wake()
        worker = self.planner.state.requests[cancel.request].worker
        self._end(cancel.request)
        log.debug("cancelled", request=cancel.request, attempt=cancel.attempt)
        view = self.planner.state.workers.get(worker) if worker else None
        if view is not None and cancel.request in view.to_release:
            self.commands[view.id].cancels.append(entry)
        else:
            self.outbox.settle([entry])

    def lose_gateways(self, living: Collection[str], noticed: int) -> list[GatewayId]:
        """End what belongs to gateways that are gone, as of ``noticed`` requests, and return those gateways."""
        gone = {
            known.submit.gateway
            for known in self.known
            if known.noticed <= noticed and known.submit.gateway not in living
        }
        for known in [known for known in self.known if known.submit.gateway in gone]:
            self._end(known.submit.request)
        if gone:
            self._wake()
            log.warning("gateways_lost", gateways=sorted(gone))
        return sorted(gone)

    def refuse_if_without_worker(self, now_s: float) -> None:
        """Refuse everyone who waits when there has been no worker for a minute."""
        if self.commands or not len(self.known):
            self.without_worker_since_s = None
        elif self.without_worker_since_s is None:
            self.without_worker_since_s = now_s
        elif now_s - self.without_worker_since_s > NO_WORKER_S:
            for known in list(self.known):
                self.outbox.say(names.tokens(known.submit.gateway), no_worker(known.submit))
                self._end(known.submit.request)

    def _is_old_news(self, submit: SubmitRequest) -> bool:
        if self._ended.get(submit.request, -1) >= submit.attempt:
            return True
        known = self.known.get(submit.request)
        return known is not None and known.submit.attempt >= submit.attempt

    def _is_too_long(self, submit: SubmitRequest) -> bool:
        return 0 < self.length_served < len(submit.prompt_ids) + submit.max_tokens

    def _refuse_too_long(self) -> None:
        for known in list(self.known):
            waits = self.planner.state.requests[known.submit.request].worker is None
            if waits and self._is_too_long(known.submit):
                self.outbox.say(names.tokens(known.submit.gateway), too_long(known.submit, self.length_served))
                self._end(known.submit.request)

    def _end(self, request: RequestId) -> None:
        self.planner.end(request)
        self.outbox.settle(self.known.forget(request))

    # -- plans and lists ----------------------------------------------------------------------------------------

    def next_plan_at(self) -> float | None:
        """Return when `make_plans` has something to do next; None if an event must come first."""
        moments = [self._plan_at(command) for command in self.commands.values()]
        return min((moment for moment in moments if moment is not None), default=None)

    def make_plans(self, now_s: float) -> None:
        """Plan one step for every worker whose next plan is due."""
        for command in self.commands.values():
            moment = self._plan_at(command)
            if moment is not None and moment <= now_s:
                self._plan(command, now_s)

    def _plan_at(self, command: Command) -> float | None:
        if not command.is_claimed or command.is_idle:
            return None
        view = self.planner.state.workers[command.worker]
        return plan_at(view, self.pace.plan_depth, command.times, command.running_since_s)

    def _plan(self, command: Command, now_s: float) -> None:
        step = self.planner.next_step(command.worker)
        if step.is_empty:
            command.is_idle = True
            return
        submissions = {a.request: self.known.message(a.request) for a in step.admitted if a.is_new}
        plan = plan_of(step, command.epoch, command.next_number(now_s), submissions)
        self.outbox.say(names.plans(command.worker), plan)
        self.outbox.settle(command.cancels)
        command.cancels = []
        log.debug(
            "plan",
            worker=command.worker,
            epoch=plan.epoch,
            step=plan.step,
            slices=[(slice_.request, slice_.start, slice_.count) for slice_ in plan.slices],
            new=[new.submit.request for new in plan.new],
            preempted=list(plan.preempted),
            released=list(plan.released),
        )

    def _wake(self) -> None:
        """Let every worker be planned again: something has happened."""
        for command in self.commands.values():
            command.is_idle = False

    def say_held(self, gateways: Collection[str], read_to: EntryId | None) -> None:
        """Tell each living gateway what is held for it, and how far ``requests`` has been read."""
        held = self.known.of_gateways()
        report = report_of(self.planner.state, self.length_served)
        for gateway in map(GatewayId, gateways):
            rows = tuple(HeldRequest(k.submit.request, k.submit.attempt) for k in held.get(gateway, ()))
            self.outbox.say(names.tokens(gateway), Held(read_to, rows, report))
        self.held_is_due = False
