"""A whole pool for the property and pressure tests of the planner: gateways, workers and a leader made of counters.

Every event checks every invariant that it can have broken, and `corners` counts how often the rare ones were met.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from shared.ids import BlockId, RequestId, WorkerId
from shared.paging.block_hash import TokenPrefix
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling import invariants
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Phase, Request
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Step
from tests.harness import check_plan, check_worker, first_of, settle
from tests.model_worker import KEY, Held, Host, ModelWorker, Published, Submission

Attempt = tuple[RequestId, int]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a pool is made of."""

    policy: str
    limits: Limits
    kv: str = "paged"
    order: str = "fcfs"
    depth: int = 1
    blocks: int = 8
    block_tokens: int = 2


@dataclass(frozen=True, slots=True)
class Client:
    """What a gateway knows of a request that it owes an answer."""

    submission: Submission
    max_tokens: int
    arrival: tuple[int, int]
    priority: int = 0
    tenant: str = ""


@dataclass(slots=True)
class Memory:
    """What a preempted request left behind, for counting corners."""

    blocks: tuple[BlockId, ...]
    named: int
    was_in_flight: bool


@dataclass
class Rig:
    """One leader's planner, its workers, and all requests that gateways owe."""

    setup: Setup
    planner: Planner = field(init=False)
    hosts: dict[WorkerId, Host] = field(init=False, default_factory=dict)
    owed: dict[RequestId, Client] = field(init=False, default_factory=dict)
    cancelled: set[Attempt] = field(init=False, default_factory=set)
    answered: set[Attempt] = field(init=False, default_factory=set)
    """Whose whole answer a worker has sent to the gateway, which owes nothing from then on."""
    departures: list[Attempt] = field(init=False, default_factory=list)
    steps: list[Step] = field(init=False, default_factory=list)
    preempted: Counter[Attempt] = field(init=False, default_factory=Counter)
    corners: Counter[str] = field(init=False, default_factory=Counter)
    _left_behind: dict[RequestId, Memory] = field(init=False, default_factory=dict)
    _newcomers: list[bool] = field(init=False, default_factory=list)
    """Of each newcomer in turn, whether it was the oldest of those who waited."""

    def __post_init__(self) -> None:
        self.planner = self._new_planner()

    def _new_planner(self) -> Planner:
        self._newcomers.clear()
        setup = self.setup
        return Planner(POLICIES[setup.policy], setup.limits, KV_MANAGERS[setup.kv], ORDERS[setup.order]())

    # -- parts come and go --------------------------------------------------------------------------------------

    def join(self, name: WorkerId) -> None:
        self.hosts[name] = Host(ModelWorker(self.setup.block_tokens))
        self.planner.add_worker(self._view(name))

    def _view(self, name: WorkerId) -> WorkerView:
        return WorkerView(name, BlockPool(self.setup.blocks, self.setup.block_tokens, KEY), max_model_len=10_000)

    def die(self, name: WorkerId) -> None:
        """A worker dies with all that it had; the gateways submit what they lost again."""
        dead = self.hosts.pop(name)
        for request in self.planner.drop_worker(name):
            client = self.owed[request]
            self.departures.append((request, client.submission.attempt))
            held = dead.model.held.get(request)
            self._resubmit(client, held)

    def change_leader(self) -> None:
        """A new leader claims every worker, takes over what they hold, and reads the waiting line from the beginning.

        The claim stands behind every plan published, so all of them are executed. Nobody reads their results: what
        ended meanwhile is seen in the worker's answer.
        """
        self.corners["leader changes"] += 1
        preempted_before = {id_: request.preemptions for id_, request in self.planner.state.requests.items()}
        self.planner = self._new_planner()
        for name, host in sorted(self.hosts.items()):
            while host.steps:
                self.execute(name)
            host.results.clear()
            self._adopt_all(name, host.model)
        for request in [request for request, client in self.owed.items() if _attempt_of(client) in self.answered]:
            self._depart_if_owed(_attempt_of(self.owed[request]))  # it left with a plan that nobody heard the result of
        for request, client in self.owed.items():
            known = self.planner.state.requests.get(request)
            if known is not None and known.attempt == client.submission.attempt:
                known.preemptions = preempted_before.get(request, 0)  # so that the bound of three can be checked
                continue
            if known is not None:
                self.planner.end(request)
            self.planner.submit(_request_of(client))

    def _adopt_all(self, name: WorkerId, model: ModelWorker) -> None:
        view = self._view(name)
        self.planner.add_worker(view)
        tables = Counter(block for held in model.held.values() for block in held.table if not held.ended)
        for block in sorted(model.names, key=lambda block: (-tables[block], block)):
            view.pool.name(block, view.pool.stamp(block), model.names[block])
        self.corners["leader changes with shared tables"] += max(tables.values(), default=0) > 1
        for request, held in model.held.items():
            attempt = (request, held.submission.attempt)
            if held.ended or attempt in self.cancelled:
                view.to_release.append(request)
            else:
                self.planner.adopt(view, self._request_of_resident(held))

    def _depart_if_owed(self, attempt: Attempt) -> None:
        client = self.owed.get(attempt[0])
        if client is not None and client.submission.attempt == attempt[1]:
            del self.owed[attempt[0]]
            self.departures.append(attempt)

    def _request_of_resident(self, held: Held) -> Request:
        client = self.owed[held.submission.request]
        request = _request_of(replace(client, submission=replace(held.submission, output=held.output)))
        request.computed, request.blocks = held.computed, list(held.table)
        return request

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, client: Client) -> None:
        """A request arrives; one that no worker could hold is refused at the door."""
        if len(client.submission.prompt) + client.max_tokens <= self.setup.blocks * self.setup.block_tokens:
            self.owed[client.submission.request] = client
            self.planner.submit(_request_of(client))

    def cancel(self, request: RequestId) -> None:
        self._end(request)
        del self.owed[request]

    def supersede(self, request: RequestId) -> None:
        """The gateway takes a request for lost that is held, and submits it again."""
        client = self.owed[request]
        worker = self.planner.state.requests[request].worker
        held = self.hosts[worker].model.held.get(request) if worker else None
        self._end(request)
        self._resubmit(client, held)

    def _end(self, request: RequestId) -> None:
        attempt = _attempt_of(self.owed[request])
        self.cancelled.add(attempt)
        self.departures.append(attempt)
        self.planner.end(request)

    def _resubmit(self, client: Client, held: Held | None) -> None:
        """Submit what the gateway has accepted of the answer; if that is all, it needs nobody any more."""
        submission = client.submission
        if held is not None and held.submission.attempt == submission.attempt:
            submission = replace(submission, output=held.output)
        if len(submission.output) >= submission.ends_after:
            del self.owed[submission.request]
            return
        again = replace(client, submission=replace(submission, attempt=submission.attempt + 1))
        self.owed[submission.request] = again
        self.planner.submit(_request_of(again))

    # -- iterations ---------------------------------------------------------------------------------------------

    def can_plan(self, name: WorkerId) -> bool:
        return len(self.planner.state.workers[name].in_flight) < self.setup.depth

    def plan(self, name: WorkerId) -> Step:
        view = self.planner.state.workers[name]
        first = first_of(self.planner, view)
        decoding = [request for request in view.running if request.is_decoding and not request.is_complete]
        tables = {request.id: tuple(request.blocks) for request in view.running}
        step = self.planner.next_step(name)
        check_plan(self.planner, view, step, first)
        if self.setup.policy == "sarathi":
            invariants.nobody_stalls(step, decoding, view)
        self._check_order(step, view)
        self._count_corners(step, view, tables)
        if not step.is_empty:
            self.steps.append(step)
            new = {admission.request: self.owed[admission.request].submission for admission in step.admitted}
            self.hosts[name].steps.append(Published(step, new))
        return step

    def execute(self, name: WorkerId) -> None:
        if self.hosts[name].steps:
            rows = self.hosts[name].execute()
            self.answered.update((row.outcome.request, row.outcome.attempt) for row in rows if row.outcome.ended)

    def read(self, name: WorkerId) -> None:
        if not self.hosts[name].results:
            return
        for request in settle(self.planner, name, self.hosts[name].results.popleft()):
            self._depart_if_owed((request, self.owed[request].submission.attempt))

    def turn(self, name: WorkerId) -> None:
        """Plan as deep as may be, run one step, read one result."""
        if self.can_plan(name):
            self.plan(name)
        self.execute(name)
        self.read(name)

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what must hold between any two events."""
        invariants.leaves_once(self.departures)
        state = self.planner.state
        waiting = set(state.line)
        assert len(waiting) == len(state.line)
        assert all((request in waiting) == (request.phase is Phase.WAITING) for request in state.requests.values())
        assert set(state.requests) == set(self.owed), "somebody is forgotten"
        for name, view in state.workers.items():
            check_worker(self.planner, view)
            self._check_names(name, view)

    def _check_names(self, name: WorkerId, view: WorkerView) -> None:
        """What can be found by its content is there: its step has run, and no later one hands the block out."""
        model = self.hosts[name].model
        for block in map(BlockId, range(view.pool.blocks)):
            if view.pool.is_named(block):
                content = model.names.get(block)
                assert content is not None, f"block {block} has a name and no content"
                assert view.pool.found([content]), f"block {block} has the name of another content"

    def _check_order(self, step: Step, view: WorkerView) -> None:
        pairs = invariants.overtaken(step, view, self.planner.state)
        if self.setup.order == "fcfs":
            invariants.nobody_overtakes(pairs, lambda request: self._is_passed_over(request, view))
        elif self.setup.order == "priority":
            invariants.only_the_urgent_overtake(pairs, lambda request: self._is_passed_over(request, view))
            self._check_inversion(step, view)
        else:
            self._note_newcomers(step, view)
            invariants.the_oldest_has_its_turn(self._newcomers)

    def _missing(self, request: Request, view: WorkerView) -> int:
        return request.missing_tokens - len(self._found(request, view)) * view.pool.block_tokens

    def _found(self, request: Request, view: WorkerView) -> tuple[BlockId, ...]:
        if request.prefix is None or self.setup.kv != "paged":
            return ()
        hashes = request.prefix.hashes(view.pool.hash_key, view.pool.block_tokens)
        return view.pool.found(hashes[: (request.total_tokens - 1) // view.pool.block_tokens])

    def _is_passed_over(self, request: Request, view: WorkerView) -> bool:
        cap = self.setup.limits.long_prefill_tokens
        return bool(cap) and self.planner.policy.cuts_prompts and self._missing(request, view) > cap

    def _note_newcomers(self, step: Step, view: WorkerView) -> None:
        state = self.planner.state
        rest = [r for r in state.line if r.worker in {None, view.id} and view.can_ever_hold(r)]
        rest = [request for request in rest if not self._is_passed_over(request, view)]
        for admission in reversed(step.admitted):
            rest.append(state.requests[admission.request])
        for admission in step.admitted:
            request = state.requests[admission.request]
            if admission.is_new:
                oldest = min(rest, key=lambda other: (other.arrival, other.id))
                self._newcomers.append(oldest is request)
            rest.remove(request)

    def _check_inversion(self, step: Step, view: WorkerView) -> None:
        """Where nobody joined or gave way and tokens are left, the next in line could not have taken a place."""
        head = next((r for r in self.planner.state.line if r.worker in {None, view.id}), None)
        is_turn = self.setup.policy in {"orca", "hybrid-only", "sarathi", "prefill-first"}
        if head is None or head.slices_in_flight or step.admitted or step.preempted or not is_turn:
            return
        if head.worker is None and any(self._has_place(other, head) for other in self._others(view)):
            return  # there it joins at nobody's cost
        left = self.planner.limits_of_a_step.step_tokens - step.tokens
        limits = self.setup.limits
        is_full = limits.stages > 1 and len(step.slices) == limits.max_num_seqs  # there are seats, in the next stage
        if is_full or left < (1 if self.planner.policy.cuts_prompts else self._missing(head, view)):
            self.corners["no tokens left for the head"] += 1
            return
        place = self.planner.state.line.place
        victims = {
            r.id: r
            for r in view.running
            if r.priority > head.priority and place(r) > place(head) and not r.is_protected
        }
        if not victims:
            return
        most = head.footprint.most_tokens if head.is_protected or self.setup.kv == "reserve" else head.total_tokens
        found = self._found(head, view)
        tables = Counter(block for request in victims.values() for block in request.blocks if block not in found)
        freed = sum(view.pool.holders(block) == times for block, times in tables.items())
        lacking = view.pool.blocks_for(most) - len(found) - view.pool.free_beside(found) - freed
        assert lacking > 0, f"{head.id} waits though {sorted(victims)} could give way"
        self.corners["the head waits for protected memory"] += 1

    def _others(self, view: WorkerView) -> list[WorkerView]:
        return [other for other in self.planner.state.workers.values() if other is not view]

    def _has_place(self, view: WorkerView, head: Request) -> bool:
        most = head.footprint.most_tokens if self.setup.kv == "reserve" else head.total_tokens
        seats = self.setup.limits.max_num_seqs * self.setup.limits.stages
        free = view.pool.free >= view.pool.blocks_for(most) - len(self._found(head, view))
        return len(view.running) < seats and free

    # -- corners ------------------------------------------------------------------------------------------------

    def _count_corners(self, step: Step, view: WorkerView, tables: dict[RequestId, tuple[BlockId, ...]]) -> None:
        pool, requests = view.pool, self.planner.state.requests
        for victim in step.preempted:
            self.preempted[victim, requests[victim].attempt] += 1
            named = sum(map(pool.is_named, tables[victim]))
            in_flight = requests[victim].slices_in_flight > 0
            self._left_behind[victim] = Memory(tables[victim], named, in_flight)
            self.corners["preempted in flight"] += in_flight
            self.corners["preempted beside a sharer"] += any(pool.holders(block) for block in tables[victim])
        for admission in step.admitted:
            found = admission.blocks[: admission.start // pool.block_tokens]
            self.corners["hits of newcomers"] += bool(found) and admission.is_new
            others = {b for id_, m in self._left_behind.items() if id_ != admission.request for b in m.blocks}
            self.corners["hits on what a preempted one left"] += bool(others.intersection(found))
            left = self._left_behind.pop(admission.request, None)
            if left is None or admission.is_new:
                continue
            self.corners["readmitted"] += 1
            self.corners["hits on readmission"] += bool(found)
            self.corners["hits on what was in flight at preemption"] += left.was_in_flight and len(found) > left.named
            self.corners["evicted before readmission"] += len(found) < left.named
        fed = {slice_.request for slice_ in step.slices}
        self.corners["the first waits for a block"] += any(
            r.id not in fed and not r.is_complete and not r.slices_in_flight for r in view.running[:1]
        )


def _attempt_of(client: Client) -> Attempt:
    return client.submission.request, client.submission.attempt


def _request_of(client: Client) -> Request:
    submission = client.submission
    return Request(
        submission.request,
        submission.attempt,
        client.arrival,
        len(submission.prompt),
        client.max_tokens,
        output_tokens=len(submission.output),
        priority=client.priority,
        tenant=client.tenant,
        prefix=TokenPrefix((*submission.prompt, *submission.output), submission.salt),
    )
