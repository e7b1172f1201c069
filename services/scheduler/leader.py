"""The leader of a model, without I/O: it takes what was read and gathers what is to be published (DESIGN §4)."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import assert_never

import structlog

from services.scheduler.command import Command, FromWorker
from services.scheduler.line import Line
from services.scheduler.outbox import Outbox
from services.scheduler.report import NO_WORKER_S
from services.scheduler.wire import outcomes_of, plan_of
from shared.ids import EntryId, WorkerId
from shared.paging.block_hash import BlockHash
from shared.paging.pool import BlockPool
from shared.protocol import names
from shared.protocol.messages import (
    CancelRequest,
    ClaimWorker,
    PlanRefused,
    StepFailed,
    StepPlan,
    StepResult,
    SubmitRequest,
    WorkerState,
)
from shared.scheduling.planner import Planner
from shared.scheduling.state import WorkerView
from shared.scheduling.timing import plan_at

log = structlog.get_logger()


@dataclass(slots=True)
class Leader:
    """Soft state of one leader: lost with it, and rebuilt from ``requests`` and the workers' answers."""

    planner: Planner
    line: Line
    outbox: Outbox
    plan_depth: int
    draw_nonce: Callable[[], str]
    commands: dict[WorkerId, Command] = field(default_factory=dict)
    given_up: set[WorkerId] = field(default_factory=set)
    """Workers that are dead to this leader, though their beat may still stand: never claimed again."""
    held_is_due: bool = False
    """Something was lost: the gateways should hear of it at once."""
    without_worker_since_s: float | None = None

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
        self.line.forget(lost)
        if command is not None:
            self.outbox.settle(entry for entry, _ in command.cancels)
        self.given_up.add(worker)
        self.outbox.declare_dead(worker)
        self.line.measure()
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
        self.line.forget(self.planner.drop_worker(command.worker))

    def _take_over(self, command: Command, state: WorkerState, now_s: float) -> None:
        if state.worker != command.worker:
            self.lose_worker(command.worker, f"it says that it is {state.worker}")
            return
        command.claimed(state.epoch, now_s)
        pool = _pool_of(state)
        view = WorkerView(state.worker, pool, state.size.max_model_len)
        self.planner.add_worker(view)
        for resident in state.residents:
            self.line.adopt(view, resident)
        self.line.measure()
        pending, command.cancels = command.cancels, []
        for entry, cancel in pending:  # the plan that should have carried them was refused
            self.read_cancellation(entry, cancel)
        self.held_is_due = True
        log.info("worker_claimed", worker=state.worker, epoch=state.epoch, residents=len(state.residents))

    def _apply_result(self, command: Command, result: StepResult, now_s: float) -> None:
        view = self.planner.state.workers[command.worker]
        command.times.learn(view.in_flight[0], result.step_s)
        command.answered(result, now_s)
        for row in result.rows:
            self.outbox.settle(self.line.known.settled(row.request, row.attempt))
            self.line.known.append(row.request, row.attempt, row.token_ids)  # before the blocks are named by it
        ended = self.planner.settle(command.worker, outcomes_of(result))
        self.line.finish(ended)
        log.debug("result", worker=command.worker, epoch=result.epoch, step=result.step, ended=list(ended))

    # -- the waiting line ---------------------------------------------------------------------------------------

    def read_submission(self, entry: EntryId, submit: SubmitRequest) -> None:
        """Apply a submission."""
        self._wake()
        self.line.read_submission(entry, submit)

    def read_cancellation(self, entry: EntryId, cancel: CancelRequest) -> None:
        """Apply a cancellation; if a worker must hear of it, its entry goes with the plan that says so."""
        self._wake()
        view = self.line.read_cancellation(entry, cancel)
        if view is not None:
            self.commands[view.id].cancels.append((entry, cancel))

    def lose_gateways(self, living: Collection[str], noticed: int) -> None:
        """End what belongs to gateways that are gone, as of ``noticed`` requests."""
        if self.line.lose_gateways(living, noticed):
            self._wake()

    def refuse_if_without_worker(self, now_s: float) -> None:
        """Refuse everyone who waits when there has been no worker for a minute."""
        if self.commands or not len(self.line.known):
            self.without_worker_since_s = None
        elif self.without_worker_since_s is None:
            self.without_worker_since_s = now_s
        elif now_s - self.without_worker_since_s > NO_WORKER_S:
            self.line.refuse_all()

    def say_held(self, gateways: Collection[str], read_to: EntryId | None) -> None:
        """Tell each living gateway what is held for it, and how far ``requests`` has been read."""
        self.line.say_held(gateways, read_to)
        self.held_is_due = False

    # -- plans -------------------------------------------------------------------------------------------------

    def next_plan_at(self) -> float | None:
        """Return when `make_plans` has something to do next; None if an event must come first."""
        moments = [self._plan_at(command) for command in self.commands.values()]
        return min((moment for moment in moments if moment is not None), default=None)

    def make_plans(self, now_s: float) -> None:
        """Plan one step for every worker whose next plan is due, the least busy first: newcomers go there."""
        for command in sorted(self.commands.values(), key=self._load):
            moment = self._plan_at(command)
            if moment is not None and moment <= now_s:
                self._plan(command, now_s)

    def _load(self, command: Command) -> int:
        view = self.planner.state.workers.get(command.worker)
        return len(view.running) if view else 0

    def _plan_at(self, command: Command) -> float | None:
        if not command.is_claimed or command.is_idle:
            return None
        view = self.planner.state.workers[command.worker]
        return plan_at(view, self.plan_depth, command.times, command.running_since_s)

    def _plan(self, command: Command, now_s: float) -> None:
        step = self.planner.next_step(command.worker)
        if step.is_empty:
            command.is_idle = True
            return
        submissions = {a.request: self.line.known.message(a.request) for a in step.admitted if a.is_new}
        plan = plan_of(step, command.epoch, command.next_number(now_s), submissions)
        self.outbox.say(names.plans(command.worker), plan)
        self.outbox.settle(entry for entry, _ in command.cancels)
        command.cancels = []
        _log_plan(command.worker, plan)

    def _wake(self) -> None:
        """Let every worker be planned again: something has happened."""
        for command in self.commands.values():
            command.is_idle = False


def _pool_of(state: WorkerState) -> BlockPool:
    """Return a worker's blocks with the names that it knows; who holds which is adopted next."""
    pool = BlockPool(state.size.blocks, state.size.block_tokens, state.hash_key)
    for named in state.named:
        if 0 <= named.block < pool.blocks:
            pool.name(named.block, pool.stamp(named.block), BlockHash(named.content))
    return pool


def _log_plan(worker: WorkerId, plan: StepPlan) -> None:
    if not log.is_enabled_for(logging.DEBUG):
        return
    log.debug(
        "plan",
        worker=worker,
        epoch=plan.epoch,
        step=plan.step,
        slices=[(slice_.request, slice_.start, slice_.count) for slice_ in plan.slices],
        new=[new.submit.request for new in plan.new],
        found={new.submit.request: new.start for new in plan.new if new.start},
        preempted=list(plan.preempted),
        released=list(plan.released),
    )
