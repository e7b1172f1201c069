"""A worker made of counters, for tests of the planner: it executes steps in order and notices every wrong block."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.ids import BlockId, RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling import invariants
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.planner import Outcome, Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Slice, Step


@dataclass
class ModelWorker:
    """Writes (request, attempt, position) into blocks and reads the whole context back, as a real one does with KV."""

    block_tokens: int
    answers: dict[RequestId, int]
    """How many tokens each request generates before it ends by itself."""
    memory: dict[tuple[BlockId, int], tuple[RequestId, int]] = field(default_factory=dict)
    tables: dict[RequestId, list[BlockId]] = field(default_factory=dict)
    sampled: dict[RequestId, int] = field(default_factory=dict)
    iterations: dict[RequestId, int] = field(default_factory=dict)
    attempts: dict[RequestId, int] = field(default_factory=dict)
    ended: set[RequestId] = field(default_factory=set)

    def execute(self, step: Step, requests: dict[RequestId, Request]) -> list[Outcome]:
        for request in step.released:
            del self.tables[request]  # a release of somebody unknown, or a second one, is a KeyError
            self.ended.discard(request)
            del self.sampled[request]
        for request in step.preempted:
            self.tables[request] = []
        for admission in step.admitted:
            if admission.is_new:
                self.tables[admission.request] = list(admission.blocks)
                known = requests.get(admission.request)
                self.attempts[admission.request] = known.attempt if known else 0
                self.sampled[admission.request] = 0
        return [self._run(slice_) for slice_ in step.slices]

    def _run(self, slice_: Slice) -> Outcome:
        request = slice_.request
        attempt = self.attempts[request]
        self.tables[request].extend(slice_.new_blocks)
        if request in self.ended:
            return Outcome(request, attempt, ended=False)
        for position in range(slice_.start, slice_.start + slice_.count):
            self.memory[self._slot(request, position)] = (request, position)
        for position in range(slice_.start + slice_.count):
            assert self.memory[self._slot(request, position)] == (request, position), "somebody else wrote this block"
        self.iterations[request] = self.iterations.get(request, 0) + 1
        if slice_.samples:
            self.sampled[request] += 1
        ended = slice_.samples and self.sampled[request] >= self.answers[request]
        if ended:
            self.ended.add(request)
        return Outcome(request, attempt, ended)

    def _slot(self, request: RequestId, position: int) -> tuple[BlockId, int]:
        return self.tables[request][position // self.block_tokens], position % self.block_tokens


@dataclass
class Host:
    """A model worker with the steps that were sent to it and the results it has not been heard of."""

    model: ModelWorker
    steps: deque[Step] = field(default_factory=deque)
    results: deque[list[Outcome]] = field(default_factory=deque)


class Bench:
    """One planner and one model worker, an iteration at a time (depth 1), in the words of the worked examples."""

    def __init__(
        self,
        policy: str,
        *,
        seqs: int = 8,
        budget: int = 512,
        blocks: int = 1000,
        block: int = 16,
        kv: str | None = None,
        max_model_len: int = 100_000,
        order: str = "fcfs",
        **more_limits: int,
    ) -> None:
        kv = kv or ("reserve" if policy in {"static", "orca"} else "paged")
        limits = Limits(budget, seqs, **more_limits)
        self.planner = Planner(POLICIES[policy], limits, KV_MANAGERS[kv], ORDERS[order]())
        self.answers: dict[RequestId, int] = {}
        self.worker = WorkerView(WorkerId("w"), BlockPool(blocks, block), max_model_len)
        self.model = ModelWorker(block, self.answers)
        self.planner.add_worker(self.worker)
        self.arrivals = 0
        self.steps: list[Step] = []
        self.done_at: dict[str, int] = {}

    def arrive(self, name: str, prompt: int, output: int, max_tokens: int | None = None) -> Request:
        request = Request(RequestId(name), 1, (self.arrivals, 0), prompt, max_tokens or output)
        self.arrivals += 1
        self.answers[request.id] = output
        self.planner.submit(request)
        return request

    def iterate(self) -> dict[str, int]:
        """Run one iteration and return the tokens that each request was fed."""
        ran_before = [request for request in self.worker.running if request.is_decoding]
        step = self.planner.next_step(self.worker.id)
        self._check(step, ran_before)
        if not step.is_empty:
            self.steps.append(step)
            requests = self.planner.state.requests
            ended = self.planner.settle(self.worker.id, self.model.execute(step, requests))
            self.done_at.update({str(request): len(self.steps) for request in ended})
        return {str(slice_.request): slice_.count for slice_ in step.slices}

    def iterate_times(self, times: int) -> list[dict[str, int]]:
        return [self.iterate() for _ in range(times)]

    def run_dry(self, at_most: int = 10_000) -> list[dict[str, int]]:
        fed = []
        for _ in range(at_most):
            fed.append(self.iterate())
            if not self.planner.state.requests and not self.worker.to_release:
                return fed
        raise AssertionError("requests never end")

    def blocks_of(self, name: str) -> int:
        return len(self.planner.state.requests[RequestId(name)].blocks)

    def kv_of(self, name: str) -> int:
        return self.planner.state.requests[RequestId(name)].computed

    def _check(self, step: Step, ran_before: Sequence[Request]) -> None:
        check_worker(self.planner, self.worker, step)
        if self.planner.policy is POLICIES["sarathi"]:
            invariants.nobody_stalls(step, ran_before, self.worker)


def check_preemption(step: Step, first: Request | None, requests: dict[RequestId, Request]) -> None:
    """The first in queue order never gives way, nobody joins beside a preemption, who returns has no result unread."""
    assert first is None or first.id not in step.preempted
    assert not (step.preempted and step.admitted)
    assert all(requests[admission.request].slices_in_flight == 1 for admission in step.admitted)


def check_worker(planner: Planner, worker: WorkerView, step: Step | None = None) -> None:
    """Call every invariant that can be seen in a state, and in a plan just made."""
    invariants.blocks_are_conserved(worker)
    invariants.nobody_else_holds_blocks(planner.state)
    invariants.blocks_have_one_writer(worker)
    invariants.tables_hold_what_is_computed(worker)
    invariants.preemptions_are_bounded(planner.state)
    if step is not None:
        invariants.plan_keeps_limits(step, worker, planner.limits_of_a_step)
        invariants.no_idle_plan(step, worker)
