"""Fits a step-time model to measured steps: least squares in which nothing may cost less than nothing.

Every number is a sum of amounts that are 0 or more: a curve's value at its first point and its rise to each next one,
the cost of each position that attention reads, and what a request takes beyond its steps. Deviations count relative to
what was measured, so that a decode of 10 ms is met as closely as a prompt of a second.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from loadgen.calibrate_solve import non_negative_least_squares
from shared.simulation.model import StepLoad, StepTimeModel

MIN_SIZES = 3
"""How many lengths of prompts and how many sizes of batches are needed to tell what a token costs."""
MAX_FALL = 0.3
"""How much faster than the smallest the largest step may seem to be, as a share of their mean: noise does that."""
MAX_MEDIAN_OFF = 0.3
MIN_CONTEXT_SPREAD = 4
"""The longest context must be so many times the shortest, for the cost of a position to be told from that of a row."""


KNOT_RATIO = 4
"""A curve bends at sizes so many times one another; those between show how straight it is, and average out noise."""
MIN_LONGER_PROMPTS = 2
"""How many prompts of several steps are needed to tell what later chunks cost more."""


class Nonsense(Exception):
    """The measurements make no model; the text says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: the steps that were computed, and the milliseconds they took together.

    A prompt's milliseconds last from its sending to its first token: they have in them what a request takes beyond its
    steps. The others' are steps alone.

    `size` is tokens of a prompt, or streams of a decode batch; `context` the positions that each of them read. A mixed
    step has both: `size` is then the prompt's.
    """

    kind: Literal["prompt", "decode", "mixed"]
    size: int
    context: int
    steps: tuple[StepLoad, ...]
    ms: float


@dataclass(frozen=True, slots=True)
class Residual:
    """How well a model meets a point."""

    point: Point
    predicted_ms: float

    @property
    def off(self) -> float:
        """Return the deviation as a share of what was measured; positive where the model is slower."""
        return self.predicted_ms / self.point.ms - 1


@dataclass(frozen=True, slots=True)
class Fit:
    """A model, what a request takes beyond its steps, how well both meet each point, and what could not be told."""

    model: StepTimeModel
    overhead_ms: float
    residuals: tuple[Residual, ...]
    left_out: tuple[str, ...]

    @property
    def median_off(self) -> float:
        """Return the median deviation, without its sign."""
        return float(np.median([abs(residual.off) for residual in self.residuals]))

    @property
    def worst_off(self) -> float:
        """Return the largest deviation, without its sign."""
        return max(abs(residual.off) for residual in self.residuals)

    def __str__(self) -> str:
        """Say how well the points are met."""
        return f"off by {self.median_off:.1%} in the median, {self.worst_off:.0%} at worst"


def prompt_point(tokens: int, ms: float, *, step_tokens: int) -> Point:
    """Return the point of a lone prompt that is computed in chunks of `step_tokens` and has its first token by then."""
    starts = range(0, tokens, step_tokens)
    steps = tuple(_chunk(start, min(step_tokens, tokens - start)) for start in starts)
    return Point("prompt", tokens, tokens, steps, ms)


def _chunk(start: int, tokens: int) -> StepLoad:
    pairs = tokens * start + tokens * (tokens + 1) // 2
    return StepLoad(tokens, prefill_read_tokens=start, prefill_pairs=pairs)


def decode_point(streams: int, context: float, ms: float) -> Point:
    """Return the point of one step of `streams` decodes, each of which reads `context` positions on average."""
    load = StepLoad(streams, decode_rows=streams, decode_read_tokens=round(streams * context))
    return Point("decode", streams, round(context), (load,), ms)


def mixed_point(streams: int, context: float, prompt_tokens: int, ms: float) -> Point:
    """Return the point of one step of `streams` decodes and a whole prompt."""
    decodes, chunk = decode_point(streams, context, ms).steps[0], _chunk(0, prompt_tokens)
    load = StepLoad(streams + prompt_tokens, streams, decodes.decode_read_tokens, 0, chunk.prefill_pairs)
    return Point("mixed", prompt_tokens, round(context), (load,), ms)


def fit(points: Sequence[Point]) -> Fit:
    """Return the model that meets the points best. Raises `Nonsense`."""
    prompts = [point for point in points if point.kind == "prompt"]
    decodes = [point for point in points if point.kind == "decode"]
    _check_enough(prompts, decodes)
    if any(point.ms <= 0 for point in points):
        raise Nonsense("a step seems to have taken no time: was the machine busy otherwise?")
    _check_rising("longer prompts", [point for point in prompts if len(point.steps) == 1])
    _check_rising("larger batches", _shortest_of_each_size(decodes))
    form = _Form.of(prompts, decodes)
    *amounts, overhead_ms = _solve(form, points)
    model = form.model(amounts)
    residuals = tuple(
        Residual(point, sum(map(model.step_ms, point.steps)) + overhead_ms * (point.kind == "prompt"))
        for point in points
    )
    fitted = Fit(model, overhead_ms, residuals, form.left_out)
    if fitted.median_off > MAX_MEDIAN_OFF:
        raise Nonsense(
            f"the model misses half of the points by more than {fitted.median_off:.0%}: was the machine busy otherwise?"
        )
    return fitted


def _check_enough(prompts: Sequence[Point], decodes: Sequence[Point]) -> None:
    lengths = len({point.size for point in prompts if len(point.steps) == 1})
    batches = len({point.size for point in decodes})
    if min(lengths, batches) < MIN_SIZES:
        raise Nonsense(
            f"too few points: {lengths} lengths of prompts and {batches} sizes of batches, "
            f"where {MIN_SIZES} of each are needed"
        )


def _check_rising(what: str, points: Sequence[Point]) -> None:
    sizes, ms = np.array([point.size for point in points]), np.array([point.ms for point in points])
    rise = float(np.polyfit(sizes, ms, 1)[0] * np.ptp(sizes)) / float(ms.mean())
    if rise < -MAX_FALL:
        raise Nonsense(f"{what} seem to be faster, by {-rise:.0%} at the largest: was the machine busy otherwise?")


def _shortest_of_each_size(decodes: Sequence[Point]) -> list[Point]:
    shortest: dict[int, Point] = {}
    for point in sorted(decodes, key=lambda point: point.context):
        shortest.setdefault(point.size, point)
    return list(shortest.values())


@dataclass(frozen=True, slots=True)
class _Form:
    """Which numbers are sought: a curve's rise before each of its knots, then what attention reads."""

    token_knots: tuple[int, ...]
    row_knots: tuple[int, ...]
    has_decode_reads: bool
    has_prefill_reads: bool

    @classmethod
    def of(cls, prompts: Sequence[Point], decodes: Sequence[Point]) -> "_Form":
        lengths = {point.size for point in prompts if len(point.steps) == 1}
        batches = {point.size for point in decodes}
        contexts = [point.context for point in decodes]
        # one decode is taken for a prompt of one token: more than one may cost more than as many tokens of a prompt
        return cls(
            token_knots=_knots(lengths | {min(batches)}),
            row_knots=_knots(batches),
            has_decode_reads=max(contexts) >= MIN_CONTEXT_SPREAD * min(contexts),
            has_prefill_reads=sum(len(point.steps) > 1 for point in prompts) >= MIN_LONGER_PROMPTS,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """What these measurements cannot tell, as sentences."""
        told = {
            "What a decode's context costs was not measured and counts nothing.": self.has_decode_reads,
            "What a later chunk of a prompt costs more than the first was not measured and counts nothing.": (
                self.has_prefill_reads
            ),
        }
        return tuple(sentence for sentence, is_known in told.items() if not is_known)

    def row(self, load: StepLoad) -> list[float]:
        """Return how much of each number a step of this load costs."""
        reads = [
            load.decode_read_tokens * self.has_decode_reads,
            load.prefill_read_tokens * self.has_prefill_reads,
            load.prefill_pairs * self.has_prefill_reads,
        ]
        rows = list(_rises(self.row_knots, load.decode_rows)) if load.decode_rows else [0.0] * (len(self.row_knots) - 1)
        return [1.0, *_rises(self.token_knots, load.tokens), *rows, *reads]

    def model(self, amounts: Sequence[float]) -> StepTimeModel:
        """Return the model with these numbers, in the digits that a file shows."""
        tokens, rest = amounts[: len(self.token_knots)], amounts[len(self.token_knots) :]
        rows, reads = [0.0, *rest[:-3]], [float(f"{amount:.4g}") for amount in rest[-3:]]
        return StepTimeModel(
            tokens_ms=_curve(self.token_knots, tokens),
            decode_rows_ms=((0, 0.0), *_curve(self.row_knots, rows)),
            decode_read_ms_per_token=reads[0],
            prefill_read_ms_per_token=reads[1],
            prefill_pair_ms=reads[2],
        )


def _knots(sizes: Collection[int]) -> tuple[int, ...]:
    knots = [min(sizes)]
    for size in sorted(sizes):
        if size >= KNOT_RATIO * knots[-1]:
            knots.append(size)
    return (*knots, max(sizes)) if knots[-1] < max(sizes) else tuple(knots)


def _rises(knots: Sequence[int], number: int) -> Iterator[float]:
    """Yield how much of each rise between knots a number has behind it; beyond the last knot the last rise goes on."""
    last = len(knots) - 2
    for index, (left, right) in enumerate(pairwise(knots)):
        share = max(0.0, (number - left) / (right - left))
        yield share if index == last else min(1.0, share)


def _curve(knots: Sequence[int], rises_ms: Sequence[float]) -> tuple[tuple[int, float], ...]:
    heights = np.cumsum(rises_ms).tolist()
    return tuple((knot, round(ms, 4)) for knot, ms in zip(knots, heights, strict=True))


def _solve(form: _Form, points: Sequence[Point]) -> list[float]:
    """Return the model's numbers and, last, what a request takes beyond its steps."""
    costs = [[*np.sum([form.row(load) for load in point.steps], axis=0), point.kind == "prompt"] for point in points]
    rows = [np.array(cost, dtype=np.float64) / point.ms for cost, point in zip(costs, points, strict=True)]
    return [float(amount) for amount in non_negative_least_squares(np.array(rows), np.ones(len(points)))]
