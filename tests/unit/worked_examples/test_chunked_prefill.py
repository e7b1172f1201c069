"""Worked examples about budgets and chunks, by number: Sarathi-Serve, what it was compared with, and its ablation."""

import random

import pytest

from tests.harness import Bench


def decoding(budget: int = 8, *, long_prefill_tokens: int = 0) -> Bench:
    bench = Bench("sarathi", budget=budget, seqs=min(8, budget), long_prefill_tokens=long_prefill_tokens)
    bench.arrive("B", 2, 50)
    bench.iterate()
    return bench


def test_t7_the_budget_counts_tokens_fed_not_those_cached() -> None:
    bench = Bench("sarathi", budget=8)
    bench.arrive("B", 6, 9)
    bench.iterate()
    bench.arrive("C", 6, 9)
    assert bench.iterate() == {"B": 1, "C": 6}


def test_t21_a_long_prompt_is_cut_into_what_the_decode_leaves() -> None:
    bench = decoding()
    bench.arrive("C", 10, 9)
    assert bench.iterate_times(3) == [{"B": 1, "C": 7}, {"B": 1, "C": 3}, {"B": 1, "C": 1}]


def test_t22_two_prompts_share_the_budget() -> None:
    bench = decoding()
    bench.arrive("C", 6, 9)
    bench.arrive("D", 5, 9)
    assert bench.iterate_times(3) == [{"B": 1, "C": 6, "D": 1}, {"B": 1, "C": 1, "D": 4}, {"B": 1, "C": 1, "D": 1}]


def test_t22_with_a_cap_of_5_the_longer_prompt_leaves_2_tokens_to_the_shorter() -> None:
    """Algorithm 3 knows no cap: the prompt in front takes what there is, as above. Ours bites while another waits."""
    bench = decoding(long_prefill_tokens=5)
    bench.arrive("C", 6, 9)
    bench.arrive("D", 5, 9)
    assert bench.iterate_times(3) == [{"B": 1, "C": 5, "D": 2}, {"B": 1, "C": 1, "D": 3}, {"B": 1, "C": 1, "D": 1}]


def test_t22_with_a_cap_that_both_exceed_they_are_served_as_without() -> None:
    bench = decoding(long_prefill_tokens=4)
    bench.arrive("C", 6, 9)
    bench.arrive("D", 5, 9)
    assert bench.iterate_times(3) == [{"B": 1, "C": 6, "D": 1}, {"B": 1, "C": 1, "D": 4}, {"B": 1, "C": 1, "D": 1}]


def test_t23_an_unfinished_prefill_comes_before_a_newcomer() -> None:
    bench = decoding()
    bench.arrive("E", 20, 9)
    bench.iterate()
    bench.arrive("F", 5, 9)
    assert bench.iterate_times(2) == [{"B": 1, "E": 7}, {"B": 1, "E": 6, "F": 1}]


def test_t23_with_a_cap_of_4_the_newcomer_gets_the_3_tokens_that_the_long_prefill_leaves() -> None:
    """The papers let F have a token only when E is done. With the cap E still comes first, but not with everything."""
    bench = decoding(long_prefill_tokens=4)
    bench.arrive("E", 20, 9)
    assert bench.iterate() == {"B": 1, "E": 7}  # alone it takes all
    bench.arrive("F", 4, 9)
    fed = bench.iterate_times(2)
    assert fed == [{"B": 1, "E": 4, "F": 3}, {"B": 1, "E": 6, "F": 1}]
    assert [list(rows) for rows in fed] == [["B", "E", "F"]] * 2


def test_t24_every_running_decode_gets_a_token_in_every_step_beside_a_long_prompt() -> None:
    bench = Bench("sarathi", budget=64)
    for name in "ABC":
        bench.arrive(name, 4, 100)
    bench.iterate()
    bench.arrive("long", 2000, 4)
    assert all({"A", "B", "C"} <= set(rows) for rows in bench.iterate_times(40))


def test_t24_prefill_first_stalls_every_decode_beside_a_long_prompt() -> None:
    bench = Bench("prefill-first", budget=64)
    for name in "ABC":
        bench.arrive(name, 4, 100)
    bench.iterate()
    bench.arrive("long", 2000, 4)
    assert bench.iterate() == {"long": 2000}


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
    """Sarathi-Serve's picture of ORCA: decodes and whole prompts in one step, both prompts at once."""
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


def test_t40_budget_16_with_4_decodes_cuts_30_into_12_12_6() -> None:
    bench = Bench("sarathi", budget=16)
    for name in "ABCD":
        bench.arrive(name, 1, 50)
    bench.iterate()
    bench.arrive("long", 30, 9)
    fed = bench.iterate_times(3)
    assert [rows["long"] for rows in fed] == [12, 12, 6]
    assert all(list(rows) == [*"ABCD", "long"] for rows in fed)


def test_t27_aligned_to_128_a_budget_of_600_and_3_decodes_cut_a_chunk_of_509() -> None:
    bench = Bench("sarathi", budget=600, tile_tokens=128)
    for name in "ABC":
        bench.arrive(name, 4, 50)
    bench.iterate()
    bench.arrive("long", 2000, 9)
    fed = bench.iterate_times(4)
    assert [rows["long"] for rows in fed] == [509, 509, 509, 2000 - 3 * 509]
    assert [sum(rows.values()) for rows in fed[:3]] == [512] * 3


@pytest.mark.parametrize("budget", [256, 257, 300, 383])
def test_t28_aligned_to_256_no_step_ever_has_257_tokens(budget: int) -> None:
    """The paper saw a step of 257 cost a third more than one of 256 "in some cases". So alignment is an option, and it
    is about full steps: one that is not full may have any number of tokens.
    """
    draw = random.Random(budget)
    bench = Bench("sarathi", budget=budget, seqs=32, tile_tokens=256)
    totals = set()
    for number in range(120):
        if number % 2:
            bench.arrive(f"r{number}", draw.randint(1, 400), draw.randint(1, 20))
        totals.add(sum(bench.iterate().values()))
    assert max(totals) == 256
    assert len(totals) > 10


@pytest.mark.parametrize("policy", ["orca", "hybrid-only", "prefill-first", "static"])
def test_whole_prompts_are_taken_though_the_longest_is_no_multiple_of_a_tile(policy: str) -> None:
    bench = Bench(policy, budget=64, max_model_len=1000, tile_tokens=128)
    bench.arrive("longest", 990, 10)
    assert bench.iterate() == {"longest": 990}
