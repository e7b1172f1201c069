"""The whole planner under arrivals, cancels, late results and dying workers, with every invariant after every event."""

from hypothesis import settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.ids import RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling import invariants
from shared.scheduling.limits import Limits
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from tests.harness import Host, ModelWorker, check_preemption, check_worker


class PlannerMachine(RuleBasedStateMachine):
    """Two workers at most, plans up to two deep, results read as late as the machine likes."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        kv=st.sampled_from(["paged", "paged", "reserve"]),
        limits=st.builds(Limits, st.integers(5, 24), st.integers(2, 5)),
        pool_shape=st.tuples(st.integers(4, 8), st.integers(2, 4)),
        depth=st.integers(1, 3),
    )
    def begin(self, *, policy: str, kv: str, limits: Limits, pool_shape: tuple[int, int], depth: int) -> None:
        self.policy, self.depth, self.pool_shape = policy, depth, pool_shape
        self.planner = Planner(POLICIES[policy], limits, KV_MANAGERS[kv])
        self.answers: dict[RequestId, int] = {}
        self.hosts: dict[WorkerId, Host] = {}
        self.names = 0
        self.departures: list[tuple[RequestId, int]] = []
        self.preemptions_seen = 0
        self.worker_joins()

    @precondition(lambda self: len(self.hosts) < 2)
    @rule()
    def worker_joins(self) -> None:
        self.names += 1
        name = WorkerId(f"w{self.names}")
        view = WorkerView(name, BlockPool(*self.pool_shape), max_model_len=10_000)
        self.hosts[name] = Host(ModelWorker(self.pool_shape[1], self.answers))
        self.planner.add_worker(view)

    @precondition(lambda self: len(self.hosts) > 1)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.hosts)))
        del self.hosts[name]
        for request in self.planner.drop_worker(name):
            self.departures.append((request, 1))

    @rule(sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=4))
    def arrive(self, sizes: list[tuple[int, int, int]]) -> None:
        for prompt, output, spare in sizes:
            self.names += 1
            request = Request(RequestId(f"r{self.names:04}"), 1, (self.names, 0), prompt, output + spare)
            if request.footprint.most_tokens <= self.pool_shape[0] * self.pool_shape[1]:  # else refused at the door
                self.answers[request.id] = output
                self.planner.submit(request)

    @precondition(lambda self: self.planner.state.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.planner.state.requests)))
        self.planner.end(request)
        self.departures.append((request, 1))

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.hosts)))
        view = self.planner.state.workers[name]
        if len(view.in_flight) >= self.depth:
            return
        decoding = [request for request in view.running if request.is_decoding and not request.is_complete]
        first = next((request for request in view.running if not request.is_complete), None)
        step = self.planner.next_step(name)
        check_worker(self.planner, view, step)
        check_preemption(step, first, self.planner.state.requests)
        if self.policy == "sarathi":
            invariants.nobody_stalls(step, decoding, view)
        if not step.is_empty:
            self.hosts[name].steps.append(step)
        self.preemptions_seen += len(step.preempted)

    @rule(times=st.integers(1, 12), data=st.data())
    def some_iterations(self, times: int, data: st.DataObject) -> None:
        for _ in range(times):
            self.plan(data)
            for name, host in self.hosts.items():
                self._run_and_read(name, host)

    @precondition(lambda self: any(host.steps for host in self.hosts.values()))
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from([host for _, host in sorted(self.hosts.items()) if host.steps]))
        host.results.append(host.model.execute(host.steps.popleft(), self.planner.state.requests))

    @precondition(lambda self: any(host.results for host in self.hosts.values()))
    @rule(data=st.data())
    def read_result(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, host in sorted(self.hosts.items()) if host.results]))
        for request in self.planner.settle(name, self.hosts[name].results.popleft()):
            self.departures.append((request, 1))

    @invariant()
    def invariants_hold(self) -> None:
        invariants.leaves_once(self.departures)
        for view in self.planner.state.workers.values():
            check_worker(self.planner, view)
        waiting = set(self.planner.state.line)
        assert all((request in waiting) == (request.phase.value == "waiting") for request in self.everyone())

    def everyone(self) -> list[Request]:
        return list(self.planner.state.requests.values())

    def teardown(self) -> None:
        """Whatever happened, from here on everybody ends: nobody waits for ever, and all blocks come back."""
        if not hasattr(self, "planner"):
            return
        for _ in range(2_000):
            if not self.planner.state.requests and not any(
                host.steps or host.results or self.planner.state.workers[name].to_release
                for name, host in self.hosts.items()
            ):
                break
            for name, host in self.hosts.items():
                self._turn(name, host)
        target(float(self.preemptions_seen), label="preemptions")
        assert not self.planner.state.requests, "somebody waits for ever"
        assert all(view.pool.used == 0 for view in self.planner.state.workers.values())
        assert all(not any(host.model.tables.values()) for host in self.hosts.values()), "a worker was not told"

    def _turn(self, name: WorkerId, host: Host) -> None:
        if len(self.planner.state.workers[name].in_flight) < self.depth:
            step = self.planner.next_step(name)
            if not step.is_empty:
                host.steps.append(step)
        self._run_and_read(name, host)

    def _run_and_read(self, name: WorkerId, host: Host) -> None:
        if host.steps:
            host.results.append(host.model.execute(host.steps.popleft(), self.planner.state.requests))
        if host.results:
            for request in self.planner.settle(name, host.results.popleft()):
                self.departures.append((request, 1))


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
