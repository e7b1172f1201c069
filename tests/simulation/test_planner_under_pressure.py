"""Many seeds of a pool that is far too small: the rare corners of preemption, which random events seldom reach."""

import random
from collections import Counter

import pytest

from shared.ids import RequestId, WorkerId
from shared.scheduling import invariants
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.policies import POLICIES
from tests.model_worker import Submission
from tests.planner_rig import Client, Rig, Setup

SEEDS = 25
NAME = WorkerId("w")
COURSES = [(policy, order) for policy in POLICIES for order in ORDERS]
FIRST_WAITS = "the first waits for a block"
CORNERS = (
    "hits of newcomers",
    "hits on readmission",
    "hits on what was in flight at preemption",
    "hits on what a preempted one left",
    "preempted in flight",
    "preempted beside a sharer",
    "evicted before readmission",
    FIRST_WAITS,
    "leader changes with shared tables",
)


class Pressure:
    """One worker, about twelve requests at once, room for two or three, results read late, now and then a new leader.

    Prompts begin alike and answers follow from them, so that most of what is computed could be found.
    """

    def __init__(self, policy: str, seed: int, *, order: str = "fcfs") -> None:
        self.random = random.Random(seed)
        self.rig = Rig(self._setup(policy, order))
        self.rig.join(NAME)
        for number in range(self.random.randint(6, 14)):
            self._arrive(number)

    def _setup(self, policy: str, order: str) -> Setup:
        draw = self.random
        block_tokens = draw.randint(1, 4)
        stages = draw.choice((1, 1, 2, 3)) if policy == "orca" else 1
        seqs = draw.choice((2, 4, 8))
        limits = Limits(
            draw.randint(14, 64),
            seqs,
            long_prefill_tokens=draw.choice((0, 0, 4)),
            tile_tokens=draw.choice((1, 1, 7)),
            stages=stages,
        )
        depth = draw.randint(1, 4)
        return Setup(policy, limits, "paged", order, depth, 48 // block_tokens, block_tokens)

    def run(self) -> None:
        actions = (self._plan, self._execute, self._read) * 30 + (self._change_leader, self._cancel, self._supersede)
        for _ in range(5_000):
            if not self.rig.owed and not self.rig.planner.state.workers[NAME].to_release:
                break
            self.random.choice(actions)()
            self.rig.check()
        assert not self.rig.owed, "somebody waits for ever"
        while self.rig.hosts[NAME].steps:
            self.rig.execute(NAME)
        assert not self.rig.hosts[NAME].model.held, "the worker was not told to forget somebody"

    def _arrive(self, number: int) -> None:
        draw = self.random
        common = tuple(draw.choice(((7,) * 10, (7, 7, 8) * 4, (1,) * 12))[: draw.randint(1, 12)])
        output = draw.randint(1, 34)
        salt = draw.choice(("", "", "", "s"))
        submission = Submission(RequestId(f"r{number:02}"), 1, common, output, salt=salt)
        self.rig.submit(
            Client(
                submission,
                output + draw.choice((0, 2)),
                (number * draw.choice((1, 20_000)), number),
                priority=draw.randint(0, 3),
                tenant=draw.choice("abc"),
            )
        )

    def _plan(self) -> None:
        if self.rig.can_plan(NAME):
            self.rig.plan(NAME)

    def _execute(self) -> None:
        self.rig.execute(NAME)

    def _read(self) -> None:
        for _ in range(self.random.choice((1, 1, 4))):  # now and then all at once
            self.rig.read(NAME)

    def _change_leader(self) -> None:
        self.rig.change_leader()

    def _cancel(self) -> None:
        if self.rig.owed:
            self.rig.cancel(self.random.choice(sorted(self.rig.owed)))

    def _supersede(self) -> None:
        if self.rig.owed:
            self.rig.supersede(self.random.choice(sorted(self.rig.owed)))


def outcomes(policy: str, order: str, seeds: int) -> list[Rig]:
    rigs = []
    for seed in range(seeds):
        pressure = Pressure(policy, seed, order=order)
        pressure.run()
        rigs.append(pressure.rig)
    return rigs


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_ends_within_three_preemptions_and_every_corner_is_reached(policy: str) -> None:
    rigs = [rig for order in ORDERS for rig in outcomes(policy, order, SEEDS)]
    assert max(max(rig.preempted.values(), default=0) for rig in rigs) == 3
    corners: Counter[str] = Counter()
    for rig in rigs:
        corners.update(rig.corners)
    never_met = {corner for corner in CORNERS if not corners[corner]}
    # where everybody is fed in queue order, the first waits only if all behind it are protected: too rare for few seeds
    assert never_met <= ({FIRST_WAITS} if policy in {"static", "hybrid-only", "sarathi"} else set())


@pytest.mark.parametrize(("policy", "order"), COURSES)
def test_same_seed_same_plans(policy: str, order: str) -> None:
    for one, other in zip(outcomes(policy, order, 3), outcomes(policy, order, 3), strict=True):
        invariants.same_plans(one.steps, other.steps)
