"""Worked examples of articles 0 to 2, by number: who joins a batch, and who leaves it. Iterations count from 1."""

import pytest

from shared.ids import RequestId
from shared.scheduling.policies import POLICIES
from tests.harness import Bench


def two_running(policy: str, b_outputs: int, *, seqs: int = 2) -> Bench:
    """A and B have had their first iteration; A ends in it, B goes on."""
    bench = Bench(policy, seqs=seqs)
    bench.arrive("A", 4, 1)
    bench.arrive("B", 4, b_outputs)
    bench.iterate()
    return bench


def test_t1_static_makes_a_late_request_wait_until_exec_4() -> None:
    """Article 0's reading: rows that have ended are skipped. Articles 1 and 2 let them be computed, or padded, to the
    end; that costs time and changes no plan, so it is a matter of the simulator's step-time model.
    """
    bench = two_running("static", 3)
    bench.arrive("C", 6, 5)
    assert bench.iterate_times(3) == [{"B": 1}, {"B": 1}, {"C": 6}]


@pytest.mark.parametrize("policy", ["orca", "sarathi"])
def test_t2_continuous_starts_a_late_request_at_exec_2(policy: str) -> None:
    bench = two_running(policy, 3)
    bench.arrive("C", 6, 5)
    assert bench.iterate_times(2) == [{"B": 1, "C": 6}, {"B": 1, "C": 1}]


@pytest.mark.parametrize("policy", ["orca", "sarathi"])
def test_t3_who_ended_is_replaced_by_the_first_in_line_and_the_other_keeps_its_kv(policy: str) -> None:
    bench = two_running(policy, 9)
    kv_of_b = bench.kv_of("B")
    bench.arrive("C", 6, 5)
    bench.arrive("D", 6, 5)
    assert bench.iterate() == {"B": 1, "C": 6}
    assert bench.kv_of("B") == kv_of_b + 1
    assert "A" in bench.steps[-1].released
    assert [request.id for request in bench.planner.state.line] == ["D"]


@pytest.mark.parametrize("policy", ["orca", "sarathi"])
def test_t5_admission_is_not_tied_to_completions(policy: str) -> None:
    bench = Bench(policy)
    bench.arrive("A", 4, 9)
    bench.iterate()
    bench.arrive("C", 6, 5)
    assert bench.iterate() == {"A": 1, "C": 6}


def test_t14_static_gives_the_fourth_request_no_slot_before_step_201() -> None:
    """Idle slot-steps are counted as article 1 does, though our rows that have ended are skipped (see T1)."""
    bench = Bench("static", seqs=3, blocks=4000)
    for name, outputs in (("A", 20), ("B", 57), ("C", 200), ("D", 5)):
        bench.arrive(name, 4, outputs)
    fed = bench.run_dry()
    assert next(step for step, rows in enumerate(fed, 1) if "D" in rows) == 201
    idle = sum(3 - len(rows) for rows in fed[:200])
    assert idle == (200 - 20) + (200 - 57)


@pytest.mark.parametrize("policy", ["orca", "sarathi"])
def test_t15_continuous_gives_the_slot_of_a_at_step_21(policy: str) -> None:
    bench = Bench(policy, seqs=3, blocks=4000)
    for name, outputs in (("A", 20), ("B", 57), ("C", 200), ("D", 5)):
        bench.arrive(name, 4, outputs)
    fed = bench.run_dry()
    assert bench.done_at["A"] == 20
    assert next(step for step, rows in enumerate(fed, 1) if "D" in rows) == 21
    assert {name: sum(name in rows for rows in fed) for name in "ABCD"} == {"A": 20, "B": 57, "C": 200, "D": 5}


def test_t16_outputs_23_18_290_return_at_their_own_steps_when_continuous() -> None:
    bench = Bench("orca", seqs=3, blocks=4000)
    for name, outputs in (("x", 23), ("y", 18), ("z", 290)):
        bench.arrive(name, 4, outputs)
    fed = bench.run_dry()
    assert bench.done_at == {"x": 23, "y": 18, "z": 290}
    assert sum(len(rows) for rows in fed) == 331


def test_t17_running_come_first_and_a_freed_slot_is_filled_in_the_next_build() -> None:
    bench = Bench("sarathi", seqs=2, budget=4)
    bench.arrive("A", 2, 2)
    bench.arrive("B", 2, 9)
    bench.arrive("C", 4, 9)
    assert bench.iterate_times(3) == [{"A": 2, "B": 2}, {"A": 1, "B": 1}, {"B": 1, "C": 3}]


def test_t19_both_caps_hold_in_every_plan() -> None:
    bench = Bench("sarathi", seqs=256, budget=8192, blocks=100_000)
    for number in range(300):
        bench.arrive(f"r{number}", 100, 3)
    for rows in bench.run_dry():  # every plan was checked against both caps as it was made
        assert len(rows) <= 256
        assert sum(rows.values()) <= 8192


@pytest.mark.parametrize("policy", POLICIES)
def test_t20_eos_and_length_cap_both_free_everything_in_that_step(policy: str) -> None:
    bench = Bench(policy)
    bench.arrive("by-eos", 4, 3, max_tokens=50)
    bench.arrive("by-length", 4, 3)
    bench.iterate_times(3)
    assert bench.done_at == {"by-eos": 3, "by-length": 3}
    bench.iterate()
    assert bench.worker.pool.used == 0
    assert set(bench.steps[-1].released) == {RequestId("by-eos"), RequestId("by-length")}


@pytest.mark.parametrize("policy", ["orca", "sarathi"])
def test_t32_t33_who_ends_is_never_computed_again_and_who_is_late_joins_the_next_selection(policy: str) -> None:
    bench = Bench(policy)
    bench.arrive("x1", 2, 10)
    bench.arrive("x2", 4, 2)
    bench.iterate_times(2)
    bench.arrive("x3", 4, 2)
    assert bench.iterate_times(2) == [{"x1": 1, "x3": 4}, {"x1": 1, "x3": 1}]


@pytest.mark.parametrize("outputs", [10, 200])
@pytest.mark.parametrize("policy", POLICIES)
def test_t34_n_tokens_take_exactly_n_iterations(policy: str, outputs: int) -> None:
    bench = Bench(policy)
    bench.arrive("A", 7, outputs)
    assert sum("A" in rows for rows in bench.run_dry()) == outputs


@pytest.mark.parametrize("policy", POLICIES)
def test_t18_priorities_5_1_3_1_are_served_1_1_3_5_the_earlier_of_two_first(policy: str) -> None:
    bench = Bench(policy, seqs=1, order="priority")
    for name, priority in (("five", 5), ("one", 1), ("three", 3), ("one, later", 1)):
        bench.arrive(name, 4, 1, priority=priority)
    assert [name for rows in bench.run_dry() for name in rows] == ["one", "one, later", "three", "five"]
