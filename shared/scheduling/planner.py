"""The planner: applies events to its state and makes the next step of a worker. The same in service and simulation."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.ids import RequestId, WorkerId
from shared.paging.reservation import KvManager
from shared.scheduling.draft import Draft
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.orders.port import QueueOrder
from shared.scheduling.policies import Policy
from shared.scheduling.request import Phase, Request
from shared.scheduling.state import State, WorkerView
from shared.scheduling.step import Step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one slice of a step came to, as the worker said it. ``ended``: EOS, the length cap, or its own failure.

    ``computed``: its keys and values were written; they were not if the request had ended or failed before.
    ``drew``: there is a new token.
    """

    request: RequestId
    attempt: int
    ended: bool
    computed: bool = True
    drew: bool = False


class Planner:
    """Plans steps under one policy. Updates its own state in place; what it returns is frozen."""

    def __init__(self, policy: Policy, limits: Limits, kv: KvManager, order: QueueOrder | None = None) -> None:
        self.policy = policy
        self.limits = limits
        self.kv = kv
        self.state = State(ORDERS["fcfs"]() if order is None else order)  # an empty line is false
        self.limits_of_a_step = limits
        """As the policy needs them for the workers there are."""

    def add_worker(self, worker: WorkerView) -> None:
        """Begin to plan for a worker."""
        self.state.workers[worker.id] = worker
        self._measure()

    def drop_worker(self, worker_id: WorkerId) -> tuple[RequestId, ...]:
        """Forget a dead worker and return the requests that were resident there: they are lost."""
        if self.state.workers.pop(worker_id, None) is None:
            return ()
        lost = [request for request in self.state.requests.values() if request.worker == worker_id]
        for request in lost:
            self._forget(request)
        self._measure()
        return tuple(request.id for request in lost)

    def submit(self, request: Request) -> None:
        """Let a request wait. Raises ValueError if one of its id is known."""
        if request.id in self.state.requests:
            raise ValueError(f"{request.id} is known")
        self.state.requests[request.id] = request
        self.state.line.add(request)

    def adopt(self, worker: WorkerView, request: Request) -> None:
        """Take over a request that is resident on a worker: it runs with its table, or waits there if it has none.

        Raises ValueError for one that is known, or whose table cannot be: nothing is taken over then.
        """
        if request.id in self.state.requests:
            raise ValueError(f"{request.id} is known")
        _check_table(worker, request)
        worker.pool.adopt(request.blocks)
        self.state.requests[request.id] = request
        if request.blocks:
            self.state.admit(worker, request)
        else:
            request.worker = worker.id
            self.state.line.add(request)

    def end(self, request_id: RequestId) -> None:
        """End a request now, whatever it does: its blocks are free for the next plan, which tells its worker."""
        request = self.state.requests.get(request_id)
        if request is None:
            return
        worker = self.state.workers.get(request.worker) if request.worker else None
        if worker is not None:
            if request.phase is Phase.RUNNING:
                worker.take_back(request)
            if request.phase is not Phase.LEAVING:  # one that leaves is released already
                worker.to_release.append(request.id)
        self._forget(request)

    def settle(self, worker_id: WorkerId, outcomes: Iterable[Outcome]) -> tuple[RequestId, ...]:
        """Apply the result of a worker's oldest step in flight and return who ended in it."""
        worker = self.state.workers[worker_id]
        outcomes = tuple(outcomes)
        _name_what_was_filled(worker, outcomes)
        ended = []
        for outcome in outcomes:
            request = self.state.requests.get(outcome.request)
            if request is None or request.attempt != outcome.attempt or request.worker != worker_id:
                continue  # it has left already: later news of it is ignored
            request.slices_in_flight -= 1
            request.has_drawn |= outcome.drew
            if outcome.ended:
                self.end(request.id)
                ended.append(request.id)
        return tuple(ended)

    def next_step(self, worker_id: WorkerId) -> Step:
        """Make the next step of a worker, and count it as published unless it is empty."""
        worker = self.state.workers[worker_id]
        self._let_complete_ones_leave(worker)
        draft = Draft(self.state, worker, self.limits_of_a_step, self.kv)
        self.policy.fill(draft)
        step = draft.finish(tuple(worker.to_release))
        if not step.is_empty:
            worker.to_release.clear()
            worker.in_flight.append(step)
            worker.previous = step if step.slices else worker.previous
        return step

    def _measure(self) -> None:
        budget = self.limits.max_num_batched_tokens
        if not self.policy.cuts_prompts:
            longest = self.state.length_served
            budget = max(budget, longest + -longest % self.limits.tile_tokens)  # or whole tiles would not take it whole
        self.limits_of_a_step = replace(self.limits, max_num_batched_tokens=budget)

    def _let_complete_ones_leave(self, worker: WorkerView) -> None:
        for request in [request for request in worker.running if request.is_complete]:
            worker.take_back(request)
            request.move(Phase.LEAVING)
            worker.to_release.append(request.id)

    def _forget(self, request: Request) -> None:
        if request.phase is Phase.WAITING:
            self.state.line.remove(request)
        request.move(Phase.FINISHED)
        del self.state.requests[request.id]


def _name_what_was_filled(worker: WorkerView, outcomes: tuple[Outcome, ...]) -> None:
    """Let the blocks that the oldest step in flight has filled be found, unless somebody else has got them since."""
    step = worker.in_flight.popleft()
    computed = {outcome.request for outcome in outcomes if outcome.computed} if step.fills else frozenset()
    pool = worker.pool
    for fill in step.fills:
        if fill.request.id in computed and fill.request.prefix is not None:
            hashes = fill.request.prefix.hashes(pool.hash_key, pool.block_tokens)
            if fill.index < len(hashes):  # else it has left, and what it was fed last has not been heard of
                pool.name(fill.block, fill.stamp, hashes[fill.index])


def _check_table(worker: WorkerView, request: Request) -> None:
    pool = worker.pool
    if not 0 <= request.computed < request.total_tokens:
        raise ValueError(f"{request.computed} of {request.total_tokens} tokens cannot be computed")
    if len(request.blocks) < pool.blocks_for(request.computed):
        raise ValueError(f"{request.computed} tokens are not in {len(request.blocks)} blocks")
    if any(pool.is_named(block) for block in request.blocks[request.computed // pool.block_tokens :]):
        raise ValueError("it would write into a block that others may read")
