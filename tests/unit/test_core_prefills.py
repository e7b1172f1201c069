"""Sharing a step's tokens and memory among prompts: the cap for long ones, tiles, and the watermark."""

import pytest

from shared.scheduling.limits import Limits
from shared.scheduling.prefills import PASSED_OVER_AT_MOST
from tests.harness import Bench


def capped(cap: int = 8, budget: int = 16) -> Bench:
    return Bench("sarathi", budget=budget, long_prefill_tokens=cap)


def test_a_long_prompt_takes_its_cap_then_the_short_ones_what_they_need() -> None:
    """Budget 16, cap 8: long 40, short 5, short 5."""
    bench = capped()
    for name, prompt in (("long", 40), ("one", 5), ("two", 5)):
        bench.arrive(name, prompt, 9)
    fed = bench.iterate_times(4)
    assert fed[0] == {"long": 8, "one": 5, "two": 3}
    assert fed[1] == {"one": 1, "long": 13, "two": 2}  # 8, then two's 2, and the 5 that are left
    assert fed[2] == {"one": 1, "two": 1, "long": 14}
    assert fed[3] == {"one": 1, "two": 1, "long": 5}


def test_alone_the_long_one_takes_all() -> None:
    bench = capped()
    bench.arrive("long", 40, 9)
    assert bench.iterate_times(3) == [{"long": 16}, {"long": 16}, {"long": 8}]


def test_without_a_cap_the_short_ones_wait_until_the_long_one_is_done() -> None:
    bench = capped(0)
    for name, prompt in (("long", 40), ("one", 5), ("two", 5)):
        bench.arrive(name, prompt, 9)
    assert bench.iterate_times(3) == [{"long": 16}, {"long": 16}, {"long": 8, "one": 5, "two": 3}]


def test_all_long_ones_share_one_cap_in_order_of_arrival() -> None:
    bench = capped()
    for name, prompt in (("first", 40), ("second", 40), ("short", 6)):
        bench.arrive(name, prompt, 9)
    assert bench.iterate() == {"first": 10, "short": 6}  # 8, 6, and the 2 that are left
    assert bench.iterate() == {"short": 1, "first": 15}


def test_what_the_first_long_one_leaves_of_the_share_goes_to_the_second() -> None:
    bench = capped(8, budget=20)
    bench.arrive("first", 9, 9)
    bench.arrive("second", 40, 9)
    bench.arrive("short", 6, 9)
    assert bench.iterate() == {"first": 9, "short": 6, "second": 5}  # 8 and 1; 6; what is left
    bench.arrive("late", 6, 9)
    assert bench.iterate() == {"first": 1, "short": 1, "second": 12, "late": 6}


def test_what_is_left_goes_to_all_long_ones_that_wait_in_order_of_arrival() -> None:
    """Budget 32, cap 8. The second and third find the share used up, and begin with what the short one leaves."""
    bench = capped(8, budget=32)
    for name, prompt in (("first", 9), ("second", 10), ("third", 40), ("fourth", 40), ("short", 6)):
        bench.arrive(name, prompt, 9)
    assert bench.iterate() == {"first": 9, "short": 6, "second": 10, "third": 7}
    assert bench.waiting() == ["fourth"]


def test_exactly_the_cap_is_short_and_one_more_is_long() -> None:
    bench = capped(8, budget=18)
    for name, prompt in (("long", 9), ("short", 8), ("third", 3)):
        bench.arrive(name, prompt, 9)
    assert bench.iterate() == {"long": 8, "short": 8, "third": 2}


def test_long_is_what_must_be_computed_not_what_is_found() -> None:
    bench = Bench("sarathi", budget=16, long_prefill_tokens=8, block=4)
    common = range(40)
    bench.arrive("before", [*common, 1], 2)
    bench.iterate_times(4)
    bench.arrive("long", 40, 9)
    bench.arrive("a second turn", [*common, 2], 9)
    assert bench.iterate() == {"long": 15, "a second turn": 1}


def test_the_cap_bites_in_the_prefill_turn_of_chunked_only_as_well() -> None:
    bench = Bench("chunked-only", budget=16, long_prefill_tokens=8)
    for name, prompt in (("long", 40), ("one", 5), ("two", 5)):
        bench.arrive(name, prompt, 9)
    assert bench.iterate() == {"long": 8, "one": 5, "two": 3}


def test_a_long_one_that_is_passed_over_is_admitted_before_a_later_short_one_that_finds_no_seat() -> None:
    bench = Bench("sarathi", budget=16, seqs=2, long_prefill_tokens=8)
    for name, prompt in (("first", 40), ("second", 40), ("short", 2), ("short, later", 2)):
        bench.arrive(name, prompt, 1)
    assert bench.iterate() == {"first": 14, "short": 2}
    assert bench.iterate() == {"first": 14, "short, later": 2}  # the share is first's while it lasts
    assert bench.iterate()["first"] == 12
    bench.arrive("short, last", 2, 1)
    assert bench.iterate() == {"second": 14, "short, last": 2}


# -- tiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "tile", "step_tokens"), [(512, 128, 512), (600, 128, 512), (100, 128, 100), (128, 128, 128), (7, 1, 7)]
)
def test_a_full_step_is_whole_tiles_unless_not_even_one_fits(budget: int, tile: int, step_tokens: int) -> None:
    assert Limits(budget, 1, tile_tokens=tile).step_tokens == step_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 0},
        {"max_num_batched_tokens": 8, "max_num_seqs": 9},
        {"max_num_batched_tokens": 250, "max_num_seqs": 200, "tile_tokens": 128},
        {"max_num_batched_tokens": 8, "max_num_seqs": 2, "tile_tokens": 0},
        {"max_num_batched_tokens": 8, "max_num_seqs": 2, "stages": 0},
        {"max_num_batched_tokens": 8, "max_num_seqs": 2, "long_prefill_tokens": -1},
    ],
)
def test_limits_that_contradict_one_another_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        Limits(**wrong)


# -- watermark ------------------------------------------------------------------------------------------------------


def test_an_admission_leaves_a_hundredth_of_the_blocks_free_while_others_run() -> None:
    """200 blocks of 1: two are kept. The first holds 11 after its second token, so 189 are free, and 187 may be had."""
    bench = Bench("sarathi", blocks=200, block=1, budget=512)
    bench.arrive("runs", 10, 20)
    bench.iterate()
    bench.arrive("too many", 188, 1)
    assert bench.iterate() == {"runs": 1}
    assert bench.worker.pool.free == 189
    bench.planner.end(bench.arrive("unused", 1, 1).id)
    bench.planner.end(bench.submissions["too many"].request)  # type: ignore[index]  # ids are plain strings here
    bench.arrive("just right", 186, 1)
    assert bench.iterate() == {"runs": 1, "just right": 186}


def test_alone_a_request_may_have_every_block() -> None:
    bench = Bench("sarathi", blocks=200, block=1, budget=512)
    bench.arrive("all", 199, 1)
    assert bench.iterate() == {"all": 199}


def test_what_is_reserved_needs_no_watermark() -> None:
    bench = Bench("orca", blocks=200, block=1, kv="reserve")
    bench.arrive("one", 50, 50)
    bench.arrive("two", 50, 50)
    assert bench.iterate() == {"one": 50, "two": 50}


@pytest.mark.parametrize(("long_ones", "is_fed"), [(PASSED_OVER_AT_MOST, True), (PASSED_OVER_AT_MOST + 1, False)])
def test_a_plan_does_not_look_behind_any_number_of_long_prompts(long_ones: int, *, is_fed: bool) -> None:
    bench = capped()
    for number in range(long_ones):
        bench.arrive(f"long {number}", 40, 9)
    bench.arrive("short", 5, 9)
    assert ("short" in bench.iterate()) == is_fed


def test_who_gives_way_during_the_decodes_takes_nothing_of_the_prompts_share() -> None:
    bench = Bench("sarathi", seqs=8, budget=64, blocks=60, block=4, long_prefill_tokens=16)
    bench.arrive("D1", 15, 80)
    bench.iterate_times(2)
    bench.arrive("D2", 39, 80)
    bench.iterate_times(3)
    bench.arrive("P", 150, 2).preemptions = 3  # it is no victim any more
    assert bench.iterate() == {"D1": 1, "D2": 1, "P": 62}
    hog = bench.worker.pool.allocate(bench.worker.pool.free)
    assert hog is not None
    step = bench.planner.next_step(bench.worker.id)
    assert (step.preempted, step.tokens) == (("D2",), 64)
    assert [(slice_.request, slice_.count) for slice_ in step.slices] == [("D1", 1), ("P", 63)]


def test_under_fair_a_long_prompt_that_is_passed_over_keeps_its_turn() -> None:
    """Ever new tenants bring a long prompt and seven short ones each step: who came first has its turn all the same."""
    bench = Bench("sarathi", seqs=64, budget=512, order="fair", long_prefill_tokens=256)
    bench.arrive("heavy", 3000, 1, tenant="heavy")
    while bench.waiting() or bench.running():
        bench.iterate()
    for step in range(40):
        if step == 3:
            bench.arrive("oldest", 1000, 1, tenant="heavy")
        bench.arrive(f"long {step}", 300, 1, tenant=f"long {step}")
        for number in range(7):
            bench.arrive(f"short {step} {number}", 10, 1, tenant=f"short {step} {number}")
        bench.iterate()
    assert "oldest" in bench.done_at or "oldest" in bench.running()


def test_under_fair_short_prompts_that_pass_a_long_one_over_do_not_use_up_its_turn() -> None:
    """Budget 64, cap 32. The eighth admission is the turn of the oldest, and the share has gone to the first."""
    bench = Bench("sarathi", seqs=64, budget=64, order="fair", long_prefill_tokens=32)
    bench.arrive("first", 3000, 1, tenant="heavy")
    bench.iterate()
    for number in range(6):
        bench.arrive(f"s{number}", 2, 50, tenant=f"s{number}")
    bench.iterate()
    for number in range(3):
        bench.arrive(f"late{number}", 2, 50, tenant=f"late{number}")
    bench.arrive("long as well", 100, 1, tenant="has had little")
    oldest = bench.arrive("oldest", 100, 1, tenant="heavy", at_ms=0)
    bench.planner.state.line.charge_output([oldest] * 100)
    fed = bench.iterate()
    assert {f"late{number}" for number in range(3)} < fed.keys()
    assert bench.waiting() == ["oldest", "long as well"], "it is its turn still, though its tenant has had most"
