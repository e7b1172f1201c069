"""The whole planner under arrivals, cancels, late results, dying workers and new leaders; every invariant each time."""

from hypothesis import HealthCheck, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.ids import RequestId, WorkerId
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.policies import POLICIES
from tests.model_worker import Submission
from tests.planner_rig import Client, Rig, Setup

PROMPTS = ((5, 5, 5, 5, 5, 5, 5, 5), (5, 5, 5, 6, 6, 6, 6, 6), (1, 2, 1, 2, 1, 2, 1, 2))
LIMITS = st.builds(
    Limits,
    st.integers(8, 24),
    st.integers(2, 5),
    long_prefill_tokens=st.sampled_from([0, 0, 2, 4]),
    tile_tokens=st.sampled_from([1, 1, 2, 4]),
)
SETUPS = st.builds(
    Setup,
    policy=st.sampled_from(sorted(POLICIES)),
    limits=LIMITS,
    kv=st.sampled_from(["paged", "paged", "paged", "reserve"]),
    order=st.sampled_from(sorted(ORDERS)),
    depth=st.integers(1, 4),
    blocks=st.integers(4, 8),
    block_tokens=st.integers(1, 4),
)
ARRIVALS = st.tuples(
    st.sampled_from(PROMPTS),
    st.integers(1, 8),  # tokens of the prompt
    st.integers(1, 10),  # tokens of the answer
    st.integers(0, 3),  # how many fewer than max_tokens they are
    st.integers(0, 3),  # priority
    st.sampled_from(["a", "a", "b", "c"]),
    st.sampled_from(["", "", "", "salt"]),
)


class PlannerMachine(RuleBasedStateMachine):
    """Two workers at most, plans up to four deep, results read as late as the machine likes."""

    @initialize(setup=SETUPS, stages=st.integers(1, 3))
    def begin(self, *, setup: Setup, stages: int) -> None:
        if setup.policy == "orca" and stages > 1:
            limits = Limits(setup.limits.max_num_batched_tokens, setup.limits.max_num_seqs, stages=stages)
            setup = Setup("orca", limits, setup.kv, setup.order, setup.depth, setup.blocks, setup.block_tokens)
        self.rig = Rig(setup)
        self.names = 0
        self.worker_joins()

    @precondition(lambda self: len(self.rig.hosts) < 2)
    @rule()
    def worker_joins(self) -> None:
        self.names += 1
        self.rig.join(WorkerId(f"w{self.names}"))

    @precondition(lambda self: len(self.rig.hosts) > 1)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        self.rig.die(data.draw(st.sampled_from(sorted(self.rig.hosts))))

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=4), later_ms=st.sampled_from([1, 20_000]))
    def arrive(self, arrivals: list[tuple[tuple[int, ...], int, int, int, int, str, str]], later_ms: int) -> None:
        for tokens, prompt, output, spare, priority, tenant, salt in arrivals:
            self.names += 1
            submission = Submission(RequestId(f"r{self.names:04}"), 1, tokens[:prompt], output, salt=salt)
            arrival = (self.names * later_ms, self.names)
            self.rig.submit(Client(submission, output + spare, arrival, priority, tenant))

    @precondition(lambda self: self.rig.owed)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.cancel(data.draw(st.sampled_from(sorted(self.rig.owed))))

    @precondition(lambda self: self.rig.owed)
    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        self.rig.supersede(data.draw(st.sampled_from(sorted(self.rig.owed))))

    @precondition(lambda self: self.rig.owed)
    @rule()
    def leader_changes(self) -> None:
        self.rig.change_leader()

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rig.hosts)))
        if self.rig.can_plan(name):
            self.rig.plan(name)

    @rule(times=st.integers(1, 12))
    def some_iterations(self, times: int) -> None:
        for _ in range(times):
            for name in self.rig.hosts:
                self.rig.turn(name)

    @precondition(lambda self: any(host.steps for host in self.rig.hosts.values()))
    @rule(data=st.data())
    def execute(self, data: st.DataObject) -> None:
        self.rig.execute(data.draw(st.sampled_from([n for n, host in sorted(self.rig.hosts.items()) if host.steps])))

    @precondition(lambda self: any(host.results for host in self.rig.hosts.values()))
    @rule(data=st.data(), times=st.integers(1, 4))
    def read_results(self, data: st.DataObject, times: int) -> None:
        name = data.draw(st.sampled_from([n for n, host in sorted(self.rig.hosts.items()) if host.results]))
        for _ in range(times):
            self.rig.read(name)

    @invariant()
    def invariants_hold(self) -> None:
        self.rig.check()

    def teardown(self) -> None:
        """Whatever happened, from here on everybody ends: nobody waits for ever, and all blocks come back."""
        if not hasattr(self, "rig"):
            return
        for _ in range(2_000):
            if self._is_still():
                break
            for name in self.rig.hosts:
                self.rig.turn(name)
        aimed_at = ("hits on readmission", "hits on what was in flight at preemption", "evicted before readmission")
        target(float(sum(self.rig.corners[corner] for corner in aimed_at)), label="preempted, and found again")
        assert not self.rig.owed, "somebody waits for ever"
        self.rig.check()
        assert all(view.pool.used == 0 for view in self.rig.planner.state.workers.values())
        assert not any(host.model.held for host in self.rig.hosts.values()), "a worker was not told to forget"

    def _is_still(self) -> bool:
        workers = self.rig.planner.state.workers
        return not self.rig.owed and not any(
            host.steps or host.results or workers[name].to_release for name, host in self.rig.hosts.items()
        )


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
