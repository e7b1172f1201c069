"""The simulator in virtual time: tiny cases computed by hand, then seeds."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shared.scheduling import invariants
from shared.scheduling.policies import POLICIES
from shared.simulation.model import StepTimeModel
from shared.simulation.records import Arrival, Crash, Result, Setup, StepRecord
from shared.simulation.simulator import simulate
from shared.simulation.worker import Host

A_MS_A_TOKEN = StepTimeModel(tokens_ms=((1, 1.0), (1001, 1001.0)))
TWENTY_MS = StepTimeModel(tokens_ms=((1, 20.0),))
SEEDS = 8


def setup_of(model: StepTimeModel = A_MS_A_TOKEN, **fields: object) -> Setup:
    return replace(Setup(model, kv_tokens=4096, max_num_seqs=8, max_model_len=1024), **fields)  # type: ignore[arg-type] # names are checked by the dataclass


def arrival(at_s: float, prompt: int, output: int) -> Arrival:
    return Arrival(at_s, prompt, output, output)


def times_ms(result: Result) -> list[list[float]]:
    return [[round(time_s * 1000, 6) for time_s in request.token_times_s] for request in result.requests]


# -- by hand ------------------------------------------------------------------------------------------------------


def test_two_requests_on_one_worker_get_their_tokens_at_the_times_that_one_computes_by_hand() -> None:
    setup = setup_of(max_num_batched_tokens=8)
    result = simulate(setup, [arrival(0, 4, 2), arrival(0, 6, 2)])
    # 4 + 4 tokens, then a decode and the other 2 of the prompt, then a decode: steps of 8, 3 and 1 ms
    assert times_ms(result) == [[8, 11], [11, 12]]
    assert [request.first_scheduled_s for request in result.requests] == [0, 0]
    assert [request.end_s for request in result.requests] == [pytest.approx(0.011), pytest.approx(0.012)]
    assert (result.totals.steps, result.totals.tokens) == (3, 12)
    assert result.span_s == pytest.approx(0.012)


def test_one_that_comes_during_a_step_joins_the_next() -> None:
    result = simulate(setup_of(TWENTY_MS), [arrival(0, 4, 3), arrival(0.030, 4, 1)])
    assert times_ms(result) == [[20, 40, 60], [60]]
    assert result.requests[1].first_scheduled_s == pytest.approx(0.040)


def test_at_depth_1_every_step_waits_for_the_way_there_and_back_at_depth_2_none_does() -> None:
    one = [arrival(0, 1, 10)]
    assert simulate(setup_of(TWENTY_MS, one_way_s=0.001), one).span_s == pytest.approx(10 * 0.022)
    for depth in (2, 3, 4):
        ahead = simulate(setup_of(TWENTY_MS, one_way_s=0.001, plan_depth=depth), one)
        assert ahead.span_s == pytest.approx(0.001 + 10 * 0.020 + 0.001)


def test_a_plan_ahead_is_made_late_enough_for_a_newcomer_to_join_the_very_next_step() -> None:
    result = simulate(setup_of(TWENTY_MS, plan_depth=2), [arrival(0, 1, 10), arrival(0.094, 1, 1)])
    assert times_ms(result)[1] == [120]  # the step from 100 to 120 ms was planned at 95 ms


def test_newcomers_go_to_the_worker_with_the_fewest_running() -> None:
    began: list[tuple[int, float, int]] = []

    def watch(step: StepRecord, _host: Host) -> None:
        began.append((step.worker, round(step.planned_s, 3), step.requests))

    arrivals = [arrival(at_s, 1, 3) for at_s in (0, 0.001, 0.002, 0.003)]
    simulate(setup_of(TWENTY_MS, workers=3), arrivals, watch=watch)
    assert [step for step in sorted(began) if step[1] <= 0.02] == [
        (0, 0, 1),
        (0, 0.02, 2),
        (1, 0.001, 1),
        (2, 0.002, 1),
    ]


def test_what_attention_reads_costs_what_the_model_says() -> None:
    model = StepTimeModel(
        tokens_ms=((1, 10.0),), decode_rows_ms=((1, 1.0), (2, 3.0)), decode_read_ms_per_token=0.1, prefill_pair_ms=0.01
    )
    result = simulate(setup_of(model, max_num_batched_tokens=8), [arrival(0, 12, 2)])
    first = 10 + 0.01 * 36  # 8 tokens, pairs 1 + ... + 8
    second = 10 + 0.01 * (9 + 10 + 11 + 12)
    decode = 10 + 1 + 0.1 * 13
    assert times_ms(result) == [[pytest.approx(first + second), pytest.approx(first + second + decode)]]


def test_a_request_that_ends_by_itself_is_skipped_in_the_plan_that_still_names_it() -> None:
    early = Arrival(0, 1, 3, 100)
    result = simulate(setup_of(TWENTY_MS, plan_depth=2), [early])
    assert times_ms(result) == [[20, 40, 60]]
    assert result.totals.tokens == 3


def test_a_request_larger_than_every_worker_is_refused_and_the_rest_is_served() -> None:
    result = simulate(setup_of(), [arrival(0, 1000, 100), arrival(0, 10, 5)])
    assert [request.refused for request in result.requests] == [True, False]
    assert [request.end_s is None for request in result.requests] == [True, False]


def test_nothing_arrives_nothing_happens() -> None:
    result = simulate(setup_of(), [])
    assert (result.requests, result.span_s, result.totals.steps) == ((), 0, 0)


# -- stages -------------------------------------------------------------------------------------------------------


def batches_of(setup: Setup, arrivals: Sequence[Arrival]) -> tuple[list[tuple[float, float]], Result]:
    spans: list[tuple[float, float]] = []
    result = simulate(
        setup,
        arrivals,
        watch=lambda step, _: spans.append((round(step.begun_s * 1000, 6), round(step.ended_s * 1000, 6))),
    )
    return spans, result


def test_t36_three_stages_keep_three_disjoint_batches_in_flight_and_serve_them_in_turn() -> None:
    model = StepTimeModel(tokens_ms=((1, 30.0),), stages=3)
    setup = setup_of(model, policy="orca", stages=3, max_num_seqs=2)
    spans, result = batches_of(setup, [arrival(0, 1, 3) for _ in "ABCDEF"])
    # AB, CD, EF, AB, CD, EF, ...: a batch takes 30 ms, and one ends every 10
    assert spans == [(10 * number, 10 * number + 30) for number in range(9)]
    ab, cd, ef = [30, 60, 90], [40, 70, 100], [50, 80, 110]
    assert times_ms(result) == [ab, ab, cd, cd, ef, ef]


def test_a_long_batch_delays_the_one_behind_it_in_the_stage_that_it_holds() -> None:
    setup = setup_of(A_MS_A_TOKEN, policy="orca", stages=2, max_num_seqs=1)
    spans, _ = batches_of(setup, [arrival(0, 100, 1), arrival(0, 10, 1)])
    # 50 ms in each stage; 5 ms in the first one from 50 on, then the second is still busy until 100
    assert spans == [(0, 100), (50, 105)]


def test_other_policies_have_one_batch_at_a_time_in_the_pipeline() -> None:
    model = StepTimeModel(tokens_ms=((1, 20.0),), stages=2)
    spans, _ = batches_of(setup_of(model), [arrival(0, 1, 3)])
    assert spans == [(0, 20), (20, 40), (40, 60)]
    with pytest.raises(ValueError, match="only orca keeps several batches in flight"):
        setup_of(model, policy="sarathi", stages=2)


# -- padding ------------------------------------------------------------------------------------------------------


def test_t16_padded_rows_are_computed_until_the_longest_answer_ends_and_all_return_with_it() -> None:
    arrivals = [arrival(0, 1, output) for output in (23, 18, 290)]
    one_ms = StepTimeModel(tokens_ms=((1, 1.0),))
    padded = simulate(setup_of(one_ms, policy="static", padded=True), arrivals)
    assert (padded.totals.tokens, padded.totals.padding_tokens) == (3 * 290, 539)
    assert round(padded.totals.padding_tokens / padded.totals.tokens, 3) == 0.62
    assert [request.end_s for request in padded.requests] == [pytest.approx(0.290)] * 3
    ragged = simulate(setup_of(one_ms, policy="static"), arrivals)
    assert (ragged.totals.tokens, ragged.totals.padding_tokens) == (331, 0)
    for policy in ("static", "orca", "sarathi"):
        ends = [request.end_s for request in simulate(setup_of(one_ms, policy=policy), arrivals).requests]
        assert ends == [pytest.approx(0.023), pytest.approx(0.018), pytest.approx(0.290)]


def test_padded_rows_read_their_growing_context_and_prompts_are_as_wide_as_the_longest() -> None:
    reads = StepTimeModel(tokens_ms=((1, 1.0), (1001, 1001.0)), decode_read_ms_per_token=1.0)
    result = simulate(setup_of(reads, policy="static", padded=True), [arrival(0, 5, 1), arrival(0, 3, 3)])
    # two rows of 5; then a decode at position 4 (reads 4), beside the ended row (position 6, reads 6); then 5 and 7
    assert times_ms(result)[1] == [10, 10 + 2 + 4 + 6, 10 + 12 + 2 + 5 + 7]
    assert result.totals.padding_tokens == 2 + 1 + 1


def test_the_next_padded_batch_begins_anew() -> None:
    setup = setup_of(policy="static", padded=True, max_num_seqs=2)
    result = simulate(setup, [arrival(0, 1, 1), arrival(0, 1, 2), arrival(0, 1, 1)])
    assert [request.end_s for request in result.requests] == [pytest.approx(s) for s in (0.004, 0.004, 0.005)]


# -- chunks and tiles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "chunk_loads"), [(512, 120), (2048, 6)])
def test_t26_chunks_of_a_prompt_read_their_predecessors_again(budget: int, chunk_loads: int) -> None:
    setup = setup_of(max_num_batched_tokens=budget, kv_tokens=16_384, max_model_len=16_384)
    result = simulate(setup, [arrival(0, 8192, 1)])
    assert result.totals.steps == 8192 // budget
    assert result.totals.prefill_read_tokens == chunk_loads * budget


def test_t26_reading_again_costs_time_if_the_model_says_so() -> None:
    model = StepTimeModel(tokens_ms=((1, 1.0),), prefill_read_ms_per_token=0.001)
    setup = setup_of(model, max_num_batched_tokens=512, kv_tokens=16_384, max_model_len=16_384)
    assert simulate(setup, [arrival(0, 8192, 1)]).span_s * 1000 == pytest.approx(16 + 0.001 * 120 * 512)


def test_t27_t28_a_prompt_of_257_tokens_pays_for_a_third_tile_unless_steps_are_aligned() -> None:
    tiled = StepTimeModel(tokens_ms=((128, 10.0), (256, 20.0), (384, 30.0)), tile_tokens=128)
    sizes: list[int] = []

    def span_ms(tile_tokens: int, prompt: int) -> float:
        setup = setup_of(tiled, max_num_batched_tokens=257, tile_tokens=tile_tokens)
        sizes.clear()
        result = simulate(setup, [arrival(0, prompt, 1)], watch=lambda step, _: sizes.append(step.tokens))
        return result.span_s * 1000

    assert span_ms(1, 256) == pytest.approx(20)
    assert span_ms(1, 257) == pytest.approx(30)
    assert span_ms(128, 257) == pytest.approx(20 + 10)
    assert sizes == [256, 1]


# -- prefixes -----------------------------------------------------------------------------------------------------


def test_t46_the_second_request_finds_the_blocks_that_it_shares_with_the_first() -> None:
    common = tuple(range(12))
    setup = setup_of(TWENTY_MS, kv_tokens=512 * 64, block_tokens=512, max_model_len=16_384, max_num_batched_tokens=8192)
    first = Arrival(0, 512 * 13 + 7, 2, 2, prefix=(*common, 100, 101))
    second = Arrival(1, 512 * 14, 2, 2, prefix=(*common, 200, 201))
    result = simulate(setup, [first, second])
    assert [request.cached_tokens for request in result.requests] == [0, 6144]
    assert result.totals.tokens == (512 * 13 + 7 + 1) + (512 * 14 - 6144 + 1)


# -- seeds --------------------------------------------------------------------------------------------------------


def some_arrivals(source: random.Random, count: int) -> list[Arrival]:
    arrivals = []
    at_s = 0.0
    for _ in range(count):
        at_s += source.choice((0.0, source.expovariate(20)))
        output = source.randint(1, 30)
        longest = output + source.choice((0, 0, 5))
        arrivals.append(Arrival(at_s, source.randint(1, 60), output, longest, tenant=source.choice("ab")))
    return arrivals


def some_setup(source: random.Random, policy: str) -> Setup:
    model = StepTimeModel(tokens_ms=((1, 5.0), (64, 12.0)), decode_rows_ms=((1, 0.2),), decode_read_ms_per_token=0.01)
    return Setup(
        model,
        kv_tokens=source.choice((192, 512)),
        policy=policy,
        queue=source.choice(("fcfs", "priority", "fair")),
        kv=source.choice((None, "paged")),
        workers=source.randint(1, 3),
        plan_depth=source.randint(1, 4),
        max_num_batched_tokens=source.choice((16, 64)),
        max_num_seqs=source.choice((3, 8)),
        max_model_len=128,
        block_tokens=source.choice((1, 4, 16)),
        one_way_s=source.choice((0.0, 0.0003)),
    )


def check(result: Result) -> None:
    for request in result.requests:
        assert request.end_s is not None
        assert len(request.token_times_s) == request.arrival.output_tokens
        assert list(request.token_times_s) == sorted(request.token_times_s)
        assert request.end_s == request.token_times_s[-1]
        assert request.first_scheduled_s is not None
        assert request.arrival.at_s <= request.first_scheduled_s < request.token_times_s[0]


def check_blocks(_step: StepRecord, host: Host) -> None:
    invariants.blocks_are_conserved(host.view)
    invariants.tables_hold_what_is_computed(host.view)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_finish_and_every_token_is_fed_once_unless_somebody_was_preempted(policy: str) -> None:
    preempted = 0
    for seed in range(SEEDS):
        source = random.Random(seed)
        arrivals = some_arrivals(source, 40)
        setup = some_setup(source, policy)
        if seed % 2:
            setup = replace(setup, kv="paged", kv_tokens=128, max_num_seqs=8)
        result = simulate(setup, arrivals, watch=check_blocks)
        check(result)
        at_least = sum(one.prompt_tokens + one.output_tokens - 1 for one in arrivals)
        assert result.totals.tokens >= at_least
        assert result.totals.preemptions or result.totals.tokens == at_least
        preempted += result.totals.preemptions
    assert preempted


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_that_die_lose_nothing_that_was_delivered_and_all_finish(policy: str) -> None:
    attempts = 0
    for seed in range(SEEDS):
        source = random.Random(seed)
        arrivals = some_arrivals(source, 40)
        setup = replace(some_setup(source, policy), workers=2)
        crashes = [
            Crash(source.uniform(0, 1.5), worker, source.choice((0.0, 0.2)), source.uniform(0, 0.5))
            for worker in range(2)
        ]
        result = simulate(setup, arrivals, crashes=crashes, watch=check_blocks)
        check(result)
        attempts += sum(request.attempts - 1 for request in result.requests)
    assert attempts > SEEDS


def test_one_worker_dies_and_its_request_goes_on_elsewhere_from_the_tokens_that_its_client_has() -> None:
    # dies at 50 ms with 2 tokens out, noticed at 150; the other one computes prompt and answer so far at once
    crash = Crash(0.050, worker=0, noticed_after_s=0.100)
    result = simulate(setup_of(TWENTY_MS, workers=2), [arrival(0, 4, 4)], crashes=[crash])
    assert times_ms(result) == [[20, 40, 170, 190]]
    assert (result.requests[0].attempts, result.totals.tokens) == (2, 4 + 1 + (4 + 2) + 1)


def test_without_a_worker_that_comes_back_requests_stay_unfinished_and_it_ends() -> None:
    result = simulate(setup_of(TWENTY_MS), [arrival(0, 4, 40), arrival(9, 4, 4)], crashes=[Crash(0.1, 0)])
    assert [request.end_s for request in result.requests] == [None, None]
    assert result.finished == []


def test_a_crash_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no living worker 3 at 1 s"):
        simulate(setup_of(), [], crashes=[Crash(1, 3)])


@pytest.mark.parametrize("policy", POLICIES)
def test_same_input_same_result(policy: str) -> None:
    for seed in range(3):
        one, other = (
            simulate(some_setup(source, policy), some_arrivals(source, 30))
            for source in (random.Random(seed), random.Random(seed))
        )
        assert repr(one) == repr(other)


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"policy": "best"}, "no policy 'best': one of static, orca"),
        ({"queue": "lifo"}, "no queue order 'lifo': one of fcfs"),
        ({"kv": "swap"}, "no KV manager 'swap': one of paged, reserve, reserve-longest"),
        ({"padded": True}, "only static batches are padded"),
        ({"kv_tokens": 3}, "less than one block"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        simulate(setup_of(**fields), [])  # type: ignore[arg-type] # wrong on purpose
