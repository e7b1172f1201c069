"""Many seeds of a pool that is far too small: the rare corners of preemption, which random events seldom reach."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from shared.ids import RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling import invariants
from shared.scheduling.limits import Limits
from shared.scheduling.planner import Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Step
from tests.harness import Host, ModelWorker, check_preemption, check_worker

SEEDS = 100
NAME = WorkerId("w")


class Pressure:
    """One worker, about twelve requests at once, room for two or three, results read late."""

    def __init__(self, policy: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.depth = self.random.randint(1, 3)
        block_tokens = self.random.randint(1, 4)
        self.view = WorkerView(NAME, BlockPool(48 // block_tokens, block_tokens), max_model_len=10_000)
        self.planner = Planner(POLICIES[policy], Limits(self.random.randint(8, 64), 8), KV_MANAGERS["paged"])
        self.planner.add_worker(self.view)
        self.answers: dict[RequestId, int] = {}
        self.host = Host(ModelWorker(block_tokens, self.answers))
        self.steps: list[Step] = []
        self.preemptions: Counter[RequestId] = Counter()
        self.waited_for_a_block = 0
        for number in range(self.random.randint(6, 14)):
            self._arrive(number)

    def run(self) -> None:
        for _ in range(5_000):
            if not self.planner.state.requests and not self.view.to_release:
                break
            self.random.choice((self._plan, self._execute, self._read))()
        assert not self.planner.state.requests, "somebody waits for ever"
        while self.host.steps:
            self._execute()
        assert not self.host.model.tables, "the worker was not told to forget somebody"

    def _arrive(self, number: int) -> None:
        prompt, output = self.random.randint(1, 12), self.random.randint(1, 34)
        request = Request(RequestId(f"r{number:02}"), 1, (number, 0), prompt, output + self.random.choice((0, 2)))
        self.answers[request.id] = output
        self.planner.submit(request)

    def _plan(self) -> None:
        if len(self.view.in_flight) >= self.depth:
            return
        runs = [request for request in self.view.running if not request.is_complete]
        step = self.planner.next_step(NAME)
        check_worker(self.planner, self.view, step)
        check_preemption(step, runs[0] if runs else None, self.planner.state.requests)
        if self.planner.policy is POLICIES["sarathi"]:
            invariants.nobody_stalls(step, [request for request in runs if request.is_decoding], self.view)
        fed = {slice_.request for slice_ in step.slices}
        self.waited_for_a_block += any(request in self.view.running and request.id not in fed for request in runs[:1])
        self.preemptions.update(step.preempted)
        if not step.is_empty:
            self.steps.append(step)
            self.host.steps.append(step)

    def _execute(self) -> None:
        if self.host.steps:
            step = self.host.steps.popleft()
            self.host.results.append(self.host.model.execute(step, self.planner.state.requests))

    def _read(self) -> None:
        if self.host.results:
            self.planner.settle(NAME, self.host.results.popleft())


def runs(policy: str) -> Iterator[Pressure]:
    for seed in range(SEEDS):
        pressure = Pressure(policy, seed)
        pressure.run()
        yield pressure


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_ends_within_three_preemptions_and_every_corner_is_reached(policy: str) -> None:
    done = list(runs(policy))
    assert max(max(pressure.preemptions.values(), default=0) for pressure in done) == 3
    assert sum(pressure.waited_for_a_block for pressure in done) > 0 or policy == "static"


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_plans(policy: str) -> None:
    for one, other in zip(runs(policy), runs(policy), strict=True):
        invariants.same_plans(one.steps, other.steps)
