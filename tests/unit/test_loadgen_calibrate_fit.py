from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
import pytest

from loadgen.calibrate_fit import (
    Nonsense,
    Point,
    decode_point,
    fit,
    mixed_point,
    prompt_point,
)
from loadgen.calibrate_solve import non_negative_least_squares
from shared.simulation.model import StepLoad, StepTimeModel

TRUE = StepTimeModel(
    tokens_ms=((1, 9.5), (16, 12.0), (64, 41.0), (512, 260.0)),
    decode_rows_ms=((0, 0.0), (1, 0.0), (4, 3.0), (64, 30.0)),
    decode_read_ms_per_token=0.004,
    prefill_read_ms_per_token=0.002,
    prefill_pair_ms=0.00003,
)
OVERHEAD_MS = 4.0
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LONGER = (576, 1024, 1088, 1536)
STREAMS = (1, 2, 4, 8, 16, 32, 64)


def took(point: Point, model: StepTimeModel, noise: float = 1.0) -> Point:
    ms = (sum(model.step_ms(step) for step in point.steps) + OVERHEAD_MS * (point.kind == "prompt")) * noise
    return Point(point.kind, point.size, point.context, point.steps, ms)


def measured(
    model: StepTimeModel, *, lengths: Sequence[int] = LENGTHS + LONGER, contexts: Sequence[int] = (24, 264, 1032)
) -> list[Point]:
    """Return what a server whose steps take exactly as the model says would show."""
    shapes = [prompt_point(tokens, 1.0, step_tokens=512) for tokens in lengths]
    shapes += [decode_point(streams, context, 1.0) for context in contexts for streams in STREAMS]
    return [took(point, model) for point in shapes]


def test_a_known_model_is_found_again() -> None:
    found = fit(measured(TRUE))
    assert found.median_off < 1e-4
    assert max(abs(residual.off) for residual in found.residuals) < 1e-3
    assert found.model.decode_read_ms_per_token == pytest.approx(0.004, rel=0.01)
    assert found.model.prefill_pair_ms == pytest.approx(0.00003, rel=0.01)
    assert found.model.prefill_read_ms_per_token == pytest.approx(0.002, rel=0.05)
    assert found.left_out == ()
    assert found.overhead_ms == pytest.approx(OVERHEAD_MS, rel=0.01)
    mixed = StepLoad(300, decode_rows=24, decode_read_tokens=24 * 500, prefill_read_tokens=512, prefill_pairs=150_000)
    assert found.model.step_ms(mixed) == pytest.approx(TRUE.step_ms(mixed), rel=0.02)


def test_noise_of_three_percent_stays_noise_of_a_few_percent() -> None:
    source = np.random.default_rng(7)
    noisy = [took(point, TRUE, 1 + 0.03 * source.standard_normal()) for point in measured(TRUE)]
    found = fit(noisy)
    assert found.median_off < 0.04
    for load in (StepLoad(1, 1, 500), StepLoad(48, 48, 48 * 300), StepLoad(400, prefill_pairs=400 * 401 // 2)):
        assert found.model.step_ms(load) == pytest.approx(TRUE.step_ms(load), rel=0.08)


def test_steps_of_one_length_make_a_flat_model_that_nothing_adds_to() -> None:
    found = fit(measured(StepTimeModel(tokens_ms=((1, 20.0),))))
    assert [ms for _, ms in found.model.tokens_ms] == pytest.approx([20.0] * 6, abs=0.01)
    assert found.model.step_ms(StepLoad(640, 64, 64 * 1000)) == pytest.approx(20.0, abs=0.1)


def test_no_number_is_ever_negative_though_the_measurements_would_have_it_so() -> None:
    points = [took(point, TRUE, 0.9 if point.context > 500 else 1.0) for point in measured(TRUE)]
    model = fit(points).model
    for curve in (model.tokens_ms, model.decode_rows_ms):
        heights = [ms for _, ms in curve]
        assert heights == sorted(heights)
    assert model.decode_read_ms_per_token >= 0
    assert model.prefill_pair_ms >= 0


def test_a_curve_bends_at_every_other_doubling_so_that_points_between_check_it() -> None:
    model = fit(measured(TRUE)).model
    assert [tokens for tokens, _ in model.tokens_ms] == [1, 4, 16, 64, 256, 512]
    assert [rows for rows, _ in model.decode_rows_ms] == [0, 1, 4, 16, 64]
    few = fit([point for point in measured(TRUE) if point.size < 64 or point.kind != "decode"]).model
    assert [rows for rows, _ in few.decode_rows_ms] == [0, 1, 4, 16, 32]


def test_one_prompt_of_several_steps_is_not_enough_to_say_what_later_chunks_cost() -> None:
    found = fit(measured(TRUE, lengths=(*LENGTHS, 576)))
    assert found.model.prefill_read_ms_per_token == found.model.prefill_pair_ms == 0
    assert found.left_out == (
        "What a later chunk of a prompt costs more than the first was not measured and counts nothing.",
    )


def test_what_was_not_measured_counts_nothing_and_is_said() -> None:
    found = fit(measured(TRUE, lengths=LENGTHS, contexts=(24,)))
    assert found.model.decode_read_ms_per_token == found.model.prefill_pair_ms == 0
    assert [sentence.split(" costs ")[0] for sentence in found.left_out] == [
        "What a decode's context",
        "What a later chunk of a prompt",
    ]


def test_a_prompt_is_computed_in_chunks_of_a_step() -> None:
    assert prompt_point(1040, 1.0, step_tokens=512).steps == (
        StepLoad(512, prefill_read_tokens=0, prefill_pairs=512 * 513 // 2),
        StepLoad(512, prefill_read_tokens=512, prefill_pairs=512 * 512 + 512 * 513 // 2),
        StepLoad(16, prefill_read_tokens=1024, prefill_pairs=16 * 1024 + 16 * 17 // 2),
    )


def test_a_mixed_step_is_the_load_of_its_decodes_and_of_its_prompt() -> None:
    point = mixed_point(8, 30.5, 128, 50.0)
    assert point.steps == (StepLoad(136, 8, 244, prefill_pairs=128 * 129 // 2),)
    assert (point.kind, point.size, point.context, point.ms) == ("mixed", 128, 30, 50.0)


def test_mixed_steps_take_part_in_the_fit() -> None:
    slow = [
        mixed_point(8, 30, tokens, 2 * TRUE.step_ms(mixed_point(8, 30, tokens, 1.0).steps[0])) for tokens in (64, 128)
    ]
    found = fit([*measured(TRUE), *slow])
    assert [residual.off < -0.1 for residual in found.residuals[-2:]] == [True, True]
    assert max(residual.off for residual in found.residuals) > 0.01


def test_a_fit_says_how_well_it_meets_half_of_the_points_and_the_worst() -> None:
    points = measured(TRUE)
    points[0] = took(points[0], TRUE, 2.0)
    found = fit(points)
    assert found.worst_off == abs(found.residuals[0].off) > 0.3
    assert str(found) == f"off by {found.median_off:.1%} in the median, {found.worst_off:.0%} at worst"


def test_too_few_points_are_refused() -> None:
    with pytest.raises(Nonsense, match="too few points: 2 lengths of prompts and 7 sizes of batches"):
        fit(measured(TRUE, lengths=(16, 32, 1024)))
    with pytest.raises(Nonsense, match="too few points: 10 lengths of prompts and 0 sizes of batches"):
        fit(measured(TRUE, contexts=()))


@pytest.mark.parametrize(("kind", "sentence"), [("prompt", "longer prompts"), ("decode", "larger batches")])
def test_larger_steps_that_seem_faster_are_refused(kind: str, sentence: str) -> None:
    flat = StepTimeModel(tokens_ms=((1, 20.0),))
    largest = {"prompt": 512, "decode": 64}[kind]
    points = [
        took(point, flat, 1 - 0.6 * point.size / largest if point.kind == kind else 1.0)
        for point in measured(flat, lengths=LENGTHS)
    ]
    with pytest.raises(Nonsense, match=f"{sentence} seem to be faster, by [0-9]+%"):
        fit(points)


def test_a_slight_fall_is_noise() -> None:
    flat = StepTimeModel(tokens_ms=((1, 20.0),))
    points = [took(point, flat, 1 - 0.05 * point.size / 512) for point in measured(flat, lengths=LENGTHS)]
    assert fit(points).median_off < 0.03


def test_measurements_without_rhyme_or_reason_are_refused() -> None:
    source = np.random.default_rng(3)
    points = [took(point, TRUE, float(np.exp(source.normal(0, 3)))) for point in measured(TRUE)]
    rising = [point for point in points if point.kind == "prompt" and len(point.steps) > 1]
    rising += measured(TRUE, lengths=LENGTHS, contexts=(24,))
    rising += [point for point in points if point.kind == "decode" and point.context > 24] * 3
    with pytest.raises(Nonsense, match="misses half of the points by more than"):
        fit(rising)


def test_a_step_without_time_is_refused() -> None:
    points = measured(TRUE)
    points[3] = took(points[3], TRUE, 0.0)
    with pytest.raises(Nonsense, match="taken no time"):
        fit(points)


def best_by_trying_all(matrix: np.ndarray, target: np.ndarray) -> float:
    """Return the least error of all choices of numbers that are not 0, of those whose solution is >= 0."""
    columns = range(matrix.shape[1])
    errors = [float(np.linalg.norm(target))]
    for chosen in chain.from_iterable(combinations(columns, count) for count in range(1, matrix.shape[1] + 1)):
        part = matrix[:, chosen]
        x = np.linalg.lstsq(part, target, rcond=None)[0]
        if (x >= 0).all():
            errors.append(float(np.linalg.norm(part @ x - target)))
    return min(errors)


@pytest.mark.parametrize("seed", range(30))
def test_the_solution_is_as_good_as_the_best_of_all_choices(seed: int) -> None:
    source = np.random.default_rng(seed)
    matrix, target = source.normal(size=(12, 6)), source.normal(size=12)
    x = non_negative_least_squares(matrix, target)
    assert (x >= 0).all()
    assert float(np.linalg.norm(matrix @ x - target)) == pytest.approx(best_by_trying_all(matrix, target), abs=1e-9)
