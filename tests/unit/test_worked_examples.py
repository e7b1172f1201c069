"""Worked examples of the papers and articles that belong to the planner, by number. Iterations count from 1."""

import random

import pytest

from shared.ids import RequestId
from shared.scheduling.invariants import first_come_first_served
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


def test_t6_who_does_not_fit_is_not_admitted_though_somebody_finished() -> None:
    bench = Bench("sarathi", blocks=10, block=1)
    bench.arrive("A", 2, 1)
    bench.arrive("B", 4, 4)
    bench.iterate()
    bench.arrive("C", 7, 2)
    assert bench.iterate() == {"B": 1}


def test_t7_the_budget_counts_tokens_fed_not_those_cached() -> None:
    bench = Bench("sarathi", budget=8)
    bench.arrive("B", 6, 9)
    bench.iterate()
    bench.arrive("C", 6, 9)
    assert bench.iterate() == {"B": 1, "C": 6}


def test_t8_kv_after_the_step_is_7_and_6_of_24() -> None:
    bench = Bench("sarathi", seqs=8, budget=8, blocks=24, block=1)
    bench.arrive("B", 6, 9)
    bench.iterate()
    bench.arrive("C", 6, 9)
    bench.iterate()
    assert (bench.kv_of("B"), bench.kv_of("C"), bench.worker.pool.used) == (7, 6, 13)


def test_t9_the_token_sampled_last_has_no_kv_yet() -> None:
    bench = Bench("sarathi")
    request = bench.arrive("A", 5, 9)
    for generated in range(1, 6):
        bench.iterate()
        assert (request.output_tokens, request.computed) == (generated, 5 + generated - 1)


def test_t10_reservation_makes_c_wait_though_14_slots_are_unused() -> None:
    bench = Bench("orca", blocks=24, block=1, kv="reserve")
    bench.arrive("B", 6, 14)
    bench.iterate()
    bench.arrive("C", 6, 4)
    assert bench.iterate() == {"B": 1}
    assert (bench.kv_of("B"), bench.blocks_of("B"), bench.worker.pool.free) == (7, 20, 4)


def test_t11_on_demand_admits_c() -> None:
    bench = Bench("orca", blocks=24, block=1, kv="paged")
    bench.arrive("B", 6, 14)
    bench.iterate()
    bench.arrive("C", 6, 4)
    assert bench.iterate() == {"B": 1, "C": 6}
    assert bench.worker.pool.used == 13


def test_t12_nobody_overtakes_a_blocked_head() -> None:
    bench = Bench("orca", blocks=24, block=1, kv="reserve")
    bench.arrive("B", 6, 14)
    bench.arrive("C", 4, 6)
    bench.arrive("D", 2, 2)
    fed = bench.run_dry()
    assert all(step in ({"B": 6}, {"B": 1}) for step in fed[:14])
    assert fed[14] == {"C": 4, "D": 2}


def test_t13_paged_blocks_of_4_waste_3_slots_inside() -> None:
    bench = Bench("sarathi", blocks=6, block=4)
    bench.arrive("B", 6, 9)
    bench.iterate()
    bench.arrive("C", 6, 9)
    bench.iterate()
    assert (bench.blocks_of("B"), bench.blocks_of("C"), bench.worker.pool.free) == (2, 2, 2)
    assert 4 * 4 - bench.kv_of("B") - bench.kv_of("C") == 3


def test_t14_static_gives_the_fourth_request_no_slot_before_step_201() -> None:
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


def decoding(budget: int = 8) -> Bench:
    bench = Bench("sarathi", budget=budget, seqs=min(8, budget))
    bench.arrive("B", 2, 50)
    bench.iterate()
    return bench


def test_t21_a_long_prompt_is_cut_into_what_the_decode_leaves() -> None:
    bench = decoding()
    bench.arrive("C", 10, 9)
    assert bench.iterate_times(3) == [{"B": 1, "C": 7}, {"B": 1, "C": 3}, {"B": 1, "C": 1}]


def test_t22_two_prompts_share_the_budget() -> None:
    bench = decoding()
    bench.arrive("C", 6, 9)
    bench.arrive("D", 5, 9)
    assert bench.iterate_times(3) == [{"B": 1, "C": 6, "D": 1}, {"B": 1, "C": 1, "D": 4}, {"B": 1, "C": 1, "D": 1}]


def test_t23_an_unfinished_prefill_comes_before_a_newcomer() -> None:
    bench = decoding()
    bench.arrive("E", 20, 9)
    bench.iterate()
    bench.arrive("F", 5, 9)
    assert [list(rows) for rows in bench.iterate_times(2)] == [["B", "E"], ["B", "E", "F"]]


def test_t24_every_running_decode_gets_a_token_in_every_step_beside_a_long_prompt() -> None:
    bench = Bench("sarathi", budget=64)
    for name in "ABC":
        bench.arrive(name, 4, 100)
    bench.iterate()
    bench.arrive("long", 2000, 4)
    assert all({"A", "B", "C"} <= set(rows) for rows in bench.iterate_times(40))


def figure_7(policy: str, *, budget: int) -> Bench:
    """A and B decode, A three times more; C and D arrive after iteration 1; C is two chunks of what is left of 5."""
    bench = Bench(policy, budget=budget, seqs=4)
    bench.arrive("A", 1, 3)
    bench.arrive("B", 1, 9)
    bench.iterate()
    bench.arrive("C", 6, 9)
    bench.arrive("D", 6, 9)
    return bench


def test_t25_sarathi_of_figure_7() -> None:
    bench = figure_7("sarathi", budget=5)
    assert bench.iterate_times(3) == [{"A": 1, "B": 1, "C": 3}, {"A": 1, "B": 1, "C": 3}, {"B": 1, "C": 1, "D": 3}]


def test_t25_orca_of_figure_7() -> None:
    bench = figure_7("orca", budget=512)
    assert bench.iterate_times(2) == [{"A": 1, "B": 1, "C": 6, "D": 6}, {"A": 1, "B": 1, "C": 1, "D": 1}]


def test_t25_early_vllm_of_figure_7() -> None:
    bench = Bench("prefill-first", budget=8, seqs=4, max_model_len=15)  # so that the budget takes one prompt, whole
    bench.arrive("A", 1, 5)
    bench.arrive("B", 1, 9)
    bench.iterate()
    bench.arrive("C", 8, 7)
    bench.arrive("D", 8, 7)
    assert bench.iterate_times(4) == [{"C": 8}, {"D": 8}, dict.fromkeys("ABCD", 1), dict.fromkeys("ABCD", 1)]


def test_t24_prefill_first_stalls_every_decode_beside_a_long_prompt() -> None:
    bench = Bench("prefill-first", budget=64)
    for name in "ABC":
        bench.arrive(name, 4, 100)
    bench.iterate()
    bench.arrive("long", 2000, 4)
    assert bench.iterate() == {"long": 2000}


def test_chunked_only_takes_turns_between_chunks_and_decodes() -> None:
    bench = Bench("chunked-only", budget=8)
    bench.arrive("A", 2, 9)
    bench.iterate()
    bench.arrive("C", 20, 9)
    fed = bench.iterate_times(6)
    assert fed == [{"A": 1}, {"C": 8}, {"A": 1}, {"C": 8}, {"A": 1}, {"C": 4}]
    assert bench.iterate_times(2) == [{"A": 1, "C": 1}, {"A": 1, "C": 1}]


def test_hybrid_only_feeds_decodes_and_whole_prompts_in_one_step() -> None:
    bench = Bench("hybrid-only", budget=8)
    bench.arrive("A", 2, 9)
    bench.iterate()
    bench.arrive("C", 2000, 9)
    assert bench.iterate_times(2) == [{"A": 1, "C": 2000}, {"A": 1, "C": 1}]


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


def test_t40_budget_16_with_4_decodes_cuts_30_into_12_12_6() -> None:
    bench = Bench("sarathi", budget=16)
    for name in "ABCD":
        bench.arrive(name, 1, 50)
    bench.iterate()
    bench.arrive("long", 30, 9)
    assert [rows["long"] for rows in bench.iterate_times(3)] == [12, 12, 6]


def test_t43_block_4_prompt_7_holds_2_2_3_blocks() -> None:
    bench = Bench("sarathi", blocks=8, block=4)
    bench.arrive("A", 7, 9)
    held = []
    for _ in range(3):
        bench.iterate()
        held.append(bench.blocks_of("A"))
    assert held == [2, 2, 3]


def test_t45_the_last_running_gives_way_nobody_is_admitted_and_it_resumes_by_recompute() -> None:
    bench = Bench("sarathi", blocks=4, block=4)
    bench.arrive("A", 8, 6)
    bench.arrive("B", 7, 6)
    bench.iterate()
    bench.arrive("C", 1, 1)
    assert bench.iterate() == {"A": 1}
    assert bench.steps[-1].preempted == ("B",)
    assert [request.id for request in bench.planner.state.line] == ["B", "C"]
    fed = bench.run_dry()
    again = next(rows for rows in fed if "B" in rows)
    assert again["B"] == 7 + 1  # the prompt, and the token it had sampled
    assert sum("B" in rows for rows in fed) == 5


@pytest.mark.parametrize("seed", range(100))
def test_t37_orca_runs_earlier_arrivals_at_least_as_often_and_never_reserves_more_than_there_is(seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench("orca", seqs=draw.randint(1, 4), blocks=40, block=1, kv="reserve")
    for number in range(25):
        if draw.random() < 0.6:
            bench.arrive(f"r{number:02}", draw.randint(1, 10), draw.randint(1, 12))
        bench.iterate()
        in_pool = list(bench.planner.state.requests.values())
        first_come_first_served(bench.model.iterations, in_pool)
        assert sum(request.footprint.most_tokens for request in bench.worker.running) <= 40
    bench.run_dry()
