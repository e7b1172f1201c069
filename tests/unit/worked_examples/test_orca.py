"""Worked examples of ORCA's Algorithm 1, by number."""

import random

import pytest

from shared.scheduling.invariants import first_come_first_served
from shared.scheduling.policies import POLICIES
from tests.harness import Bench


def test_t36_three_stages_hold_ab_cd_ef_ab_cd_ef_ab_in_flight() -> None:
    bench = Bench("orca", seqs=2, stages=3)
    for name in "ABCDEF":
        bench.arrive(name, 4, 9)
    batches = ["".join(bench.plan()) for _ in range(3)]
    assert bench.plan() == {}  # nobody is left who is not in flight
    for _ in range(4):
        bench.read()
        batches.append("".join(bench.plan()))
    assert batches == ["AB", "CD", "EF", "AB", "CD", "EF", "AB"]


def test_t36_when_all_stages_answer_at_once_a_batch_still_has_two() -> None:
    bench = Bench("orca", seqs=2, stages=3)
    for name in "ABCDEF":
        bench.arrive(name, 4, 9)
    for _ in range(3):
        bench.plan()
    for _ in range(3):
        bench.read()
    assert ["".join(bench.plan()) for _ in range(3)] == ["AB", "CD", "EF"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", POLICIES)
def test_t37_earlier_arrivals_run_at_least_as_often_and_no_more_is_reserved_than_there_is(
    policy: str, seed: int
) -> None:
    """ORCA proves it for Algorithm 1. It holds for every policy of ours in order of arrival, as nobody is admitted
    before an earlier one. A cap for long prompts gives it up: see T23. Reserved is what the paper reserves, prompt and
    ``max_tokens``, which is one slot more than is ever used.
    """
    draw = random.Random(seed)
    bench = Bench(policy, seqs=draw.randint(1, 4), budget=draw.randint(4, 30), blocks=40, block=1, kv="reserve")
    for number in range(25):
        if draw.random() < 0.6:
            bench.arrive(f"r{number:02}", draw.randint(1, 10), draw.randint(1, 12))
        bench.iterate()
        in_pool = list(bench.planner.state.requests.values())
        first_come_first_served(bench.model.iterations, in_pool)
        assert sum(request.footprint.most_tokens for request in bench.worker.running) <= 40
    bench.run_dry()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("stages", [2, 3])
def test_t37_with_several_stages_in_flight(stages: int, seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench("orca", seqs=2, blocks=40, block=1, stages=stages)
    for number in range(60):
        if draw.random() < 0.6:
            bench.arrive(f"r{number:02}", draw.randint(1, 10), draw.randint(1, 12))
        for _ in range(draw.randint(0, stages)):
            if len(bench.worker.in_flight) < stages:
                bench.plan()
        for _ in range(draw.randint(0, stages)):
            bench.read()
        if not bench.worker.in_flight:
            first_come_first_served(bench.model.iterations, list(bench.planner.state.requests.values()))
    bench.run_dry()
