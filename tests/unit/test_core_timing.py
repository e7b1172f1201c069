"""When the next plan is made: learnt step times and the moment that follows from them, by hand-computed numbers."""

import math
import random
from collections.abc import Sequence

import pytest

from shared.ids import RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Slice, Step
from shared.scheduling.timing import ENOUGH_S, MARGIN_S, StepTimes, plan_at


def step(tokens: int) -> Step:
    return Step((Slice(RequestId("r"), 0, tokens, (), samples=True, decodes=False),), (), (), ())


def view(in_flight: Sequence[Step]) -> WorkerView:
    worker = WorkerView(WorkerId("w"), BlockPool(4, 4), 16)
    worker.in_flight.extend(in_flight)
    return worker


def test_a_learnt_time_moves_a_quarter_of_the_way_to_the_newest() -> None:
    times = StepTimes()
    times.learn(step(4), 0.100)
    assert times.predict(step(7)) == pytest.approx(0.100)
    times.learn(step(5), 0.200)
    assert times.predict(step(4)) == pytest.approx(0.125)
    times.learn(step(6), 0.025)
    assert times.predict(step(4)) == pytest.approx(0.100)
    assert times.longest_s == 0.200


def test_a_size_never_seen_takes_as_long_as_the_next_smaller_one_known() -> None:
    times = StepTimes()
    assert times.predict(step(100)) == 0
    times.learn(Step((), (), (), (RequestId("r"),)), 0.001)
    assert times.predict(step(100)) == times.predict(step(1)) == 0.001
    times.learn(step(2), 0.010)
    times.learn(step(8), 0.030)
    assert [times.predict(step(tokens)) for tokens in (1, 3, 4, 7, 8, 500)] == [
        0.001,
        0.010,
        0.010,
        0.010,
        0.030,
        0.030,
    ]


@pytest.mark.parametrize(
    ("depth", "in_flight", "moment"),
    [
        (1, [], 7.0),
        (1, [4], None),
        (2, [], 7.0),
        (2, [4], 7.0 + 0.100 - MARGIN_S),
        (2, [4, 4], None),
        (3, [], 7.0),
        (3, [4], 7.0),
        (3, [4, 16], 7.0 + 0.100 + 0.200 - MARGIN_S),
        (4, [4, 16], 7.0),
    ],
)
def test_all_plans_but_the_last_are_made_at_once(depth: int, in_flight: list[int], moment: float | None) -> None:
    times = StepTimes()
    times.learn(step(4), 0.100)
    times.learn(step(16), 0.200)
    due = plan_at(view([step(tokens) for tokens in in_flight]), depth, times, 7.0)
    assert due == (moment if moment is None else pytest.approx(moment))


def test_a_plan_that_came_late_moves_the_next_one_a_millisecond_forward_and_fifty_in_time_move_it_back() -> None:
    times = StepTimes()
    times.learn(step(4), 0.100)
    times.learn_margin(ENOUGH_S / 2)
    due = plan_at(view([step(4)]), 2, times, 7.0)
    assert due == pytest.approx(7.0 + 0.100 - MARGIN_S - 0.001)
    for _ in range(50):
        times.learn_margin(ENOUGH_S)
    assert plan_at(view([step(4)]), 2, times, 7.0) == pytest.approx(7.0 + 0.100 - MARGIN_S)


def test_the_margin_settles_where_one_plan_in_fifty_is_late() -> None:
    draw = random.Random(7)
    times = StepTimes()
    late = 0
    for number in range(20_000):
        waited_s = times.margin_s - draw.expovariate(1 / 0.002)  # what lies between a leader's clock and the worker
        late += number >= 10_000 and waited_s < ENOUGH_S
        times.learn_margin(waited_s)
    assert late / 10_000 == pytest.approx(1 / 51, rel=0.1)
    assert times.margin_s == pytest.approx(ENOUGH_S + 0.002 * math.log(51), rel=0.2)


def test_what_one_bad_second_has_added_is_gone_after_a_few() -> None:
    times = StepTimes()
    for _ in range(60):
        times.learn_margin(0.0)
    steps = 0
    while times.margin_s > 0.025:  # of which plans lie there for 3 ms less
        times.learn_margin(times.margin_s - 0.003)
        steps += 1
    assert steps <= 150


@pytest.mark.parametrize(("waited_s", "margin_s"), [(0.0, 0.05), (1.0, ENOUGH_S)])
def test_the_margin_has_bounds(waited_s: float, margin_s: float) -> None:
    times = StepTimes()
    for _ in range(1000):
        times.learn_margin(waited_s)
    assert times.margin_s == margin_s
