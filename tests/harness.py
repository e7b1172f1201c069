"""What tests of the planner share: one worker, an iteration at a time, and every invariant that a plan can show."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

from shared.ids import RequestId, WorkerId
from shared.paging.block_hash import TokenPrefix
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling import invariants
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Step
from tests.model_worker import KEY, Host, ModelWorker, Published, Row, Submission


class Shape(TypedDict, total=False):
    """What a bench may be told beside its caps."""

    block: int
    kv: str
    order: str
    max_model_len: int
    long_prefill_tokens: int
    tile_tokens: int
    stages: int


class Facts(TypedDict, total=False):
    """What a request may say beside its lengths."""

    priority: int
    tenant: str
    at_ms: int
    salt: str


class Bench:
    """One planner and one model worker, an iteration at a time (depth 1), in the words of the worked examples.

    A prompt given as a number has tokens that no other has; one given as ids is looked up in the prefix cache.
    """

    def __init__(
        self, policy: str, *, seqs: int = 8, budget: int = 512, blocks: int = 1000, **shape: Unpack[Shape]
    ) -> None:
        block = shape.get("block", 16)
        kv = shape.get("kv") or ("reserve" if policy in {"static", "orca"} else "paged")
        limits = Limits(
            budget,
            seqs,
            shape.get("long_prefill_tokens", 0),
            shape.get("tile_tokens", 1),
            shape.get("stages", 1),
        )
        order = ORDERS[shape.get("order", "fcfs")]()
        self.planner = Planner(POLICIES[policy], limits, KV_MANAGERS[kv], order)
        self.worker = WorkerView(WorkerId("w"), BlockPool(blocks, block, KEY), shape.get("max_model_len", 100_000))
        self.model = ModelWorker(block)
        self.host = Host(self.model)
        self.planner.add_worker(self.worker)
        self.arrivals = 0
        self.submissions: dict[RequestId, Submission] = {}
        self.steps: list[Step] = []
        self.done_at: dict[str, int] = {}

    def arrive(
        self,
        name: str,
        prompt: int | Sequence[int],
        output: int,
        max_tokens: int | None = None,
        **facts: Unpack[Facts],
    ) -> Request:
        base = 1000 * (self.arrivals + 1)
        ids = tuple(range(base, base + prompt)) if isinstance(prompt, int) else tuple(prompt)
        salt = facts.get("salt", "")
        request = Request(
            RequestId(name),
            1,
            (facts.get("at_ms", self.arrivals), self.arrivals),
            len(ids),
            max_tokens or output,
            priority=facts.get("priority", 0),
            tenant=facts.get("tenant", ""),
            prefix=None if isinstance(prompt, int) else TokenPrefix(ids, salt),
        )
        self.arrivals += 1
        self.submissions[request.id] = Submission(request.id, 1, ids, output, salt=salt)
        self.planner.submit(request)
        return request

    def plan(self) -> dict[str, int]:
        """Make and send a step, and return the tokens that each request is fed."""
        first = first_of(self.planner, self.worker)
        ran_before = [request for request in self.worker.running if request.is_decoding]
        step = self.planner.next_step(self.worker.id)
        check_plan(self.planner, self.worker, step, first)
        if self.planner.policy is POLICIES["sarathi"]:
            invariants.nobody_stalls(step, ran_before, self.worker)
        if not step.is_empty:
            self.steps.append(step)
            new = {admission.request: self.submissions[admission.request] for admission in step.admitted}
            self.host.steps.append(Published(step, new))
        return {str(slice_.request): slice_.count for slice_ in step.slices}

    def read(self) -> None:
        """Let the worker run the oldest step in flight and read its result; without one, do nothing."""
        if self.host.steps:
            self.host.execute()
            ended = settle(self.planner, self.worker.id, self.host.results.popleft())
            self.done_at.update({str(request): len(self.steps) for request in ended})

    def iterate(self) -> dict[str, int]:
        """Run one iteration and return the tokens that each request was fed."""
        fed = self.plan()
        self.read()
        return fed

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

    def waiting(self) -> list[str]:
        return [str(request.id) for request in self.planner.state.line]

    def running(self) -> list[str]:
        return [str(request.id) for request in self.worker.running]


def settle(planner: Planner, worker: WorkerId, rows: Sequence[Row]) -> tuple[RequestId, ...]:
    """Apply a result as the leader does: first the tokens, so that the blocks they complete can be named."""
    for row in rows:
        request = planner.state.requests.get(row.outcome.request)
        if request is None or request.attempt != row.outcome.attempt or request.worker != worker:
            continue
        if isinstance(request.prefix, TokenPrefix):
            request.prefix.append(row.token_ids)
    return planner.settle(worker, [row.outcome for row in rows])


def first_of(planner: Planner, worker: WorkerView) -> Request | None:
    """Return the first of those who run, and go on, in the order in which the next plan is made."""
    planner.state.line.sort(worker.running)
    return next((request for request in worker.running if not request.is_complete), None)


def check_plan(planner: Planner, worker: WorkerView, step: Step, first: Request | None) -> None:
    """Call every invariant that can be seen in a plan just made."""
    check_worker(planner, worker)
    invariants.plan_keeps_limits(step, worker, planner.limits_of_a_step)
    invariants.no_idle_plan(step, worker, planner.limits_of_a_step)
    invariants.named_blocks_are_only_read(step, worker)
    check_preemption(planner, step, first)


def check_preemption(planner: Planner, step: Step, first: Request | None) -> None:
    """The first never gives way, nobody joins beside a preemption, who returns has no result unread.

    Where places are taken, the first gives way to one who waits and is more urgent, and that one may join.
    """
    requests, line = planner.state.requests, planner.state.line
    assert all(requests[admission.request].slices_in_flight == 1 for admission in step.admitted)
    if not step.preempted:
        return
    joined = [requests[admission.request] for admission in step.admitted]
    if not line.takes_places:
        assert not joined
        assert first is None or first.id not in step.preempted
        return
    assert len(joined) <= 1
    head = next(iter(line), None)
    urgent = [*joined, *([head] if head else [])]
    for victim in (requests[request] for request in step.preempted):
        assert victim is not first or any(line.place(other) < line.place(victim) for other in urgent)
        assert all(line.place(other) < line.place(victim) for other in joined)


def check_worker(planner: Planner, worker: WorkerView) -> None:
    """Call every invariant that can be seen in a state."""
    invariants.blocks_are_conserved(worker)
    invariants.nobody_else_holds_blocks(planner.state)
    invariants.blocks_have_one_writer(worker)
    invariants.tables_hold_what_is_computed(worker)
    invariants.preemptions_are_bounded(planner.state)
