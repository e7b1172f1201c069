"""How long a step takes: a table by tokens, and what attention adds.

A step's time in milliseconds is the sum of

====================================  ==================================================================================
``tokens_ms``                         everything token-wise, by the tokens of the step rounded up to ``tile_tokens``:
                                      piecewise linear through the points, flat before the first, on with the last slope
``decode_rows_ms``                    what decodes add by their number, beyond being tokens; likewise piecewise linear
``decode_read_ms_per_token``          for each position whose keys and values a decode reads, its own included
``prefill_read_ms_per_token``         for each position that a chunk of a prompt finds computed and reads again
``prefill_pair_ms``                   for each pair of a prompt's token and a position it attends to, its own included
====================================  ==================================================================================

A step that feeds nobody takes no time. All but ``tokens_ms`` may be left out: then they add nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Points = Sequence[tuple[int, float]]
"""(Number of tokens or rows, milliseconds), from few to many; milliseconds never fall."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to compute, in the terms that cost something. ``tokens`` has decodes and paddings in it."""

    tokens: int
    decode_rows: int = 0
    decode_read_tokens: int = 0
    prefill_read_tokens: int = 0
    prefill_pairs: int = 0


class Curve:
    """A line through points: flat before the first, with the last slope after the last, never falling."""

    def __init__(self, points: Points) -> None:
        self._at = [number for number, _ in points]
        self._ms = [float(ms) for _, ms in points]
        pairs = pairwise(points)
        slopes = [(ms_b - ms_a) / (b - a) for (a, ms_a), (b, ms_b) in pairs]
        self._slopes = [*slopes, slopes[-1] if slopes else 0.0]

    def __call__(self, number: int) -> float:
        """Return the milliseconds at a number."""
        index = bisect_right(self._at, number) - 1
        if index < 0:
            return self._ms[0]
        return self._ms[index] + self._slopes[index] * (number - self._at[index])


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Milliseconds of a step by its load. Raises ValueError that begins with the name of the field that is wrong.

    ``stages``: parts of a pipeline that a step passes one after the other, each taking its equal share of the time.
    ``kv_tokens``: positions that one worker's KV memory has, where that is known.
    """

    tokens_ms: Points
    decode_rows_ms: Points = ((0, 0.0),)
    decode_read_ms_per_token: float = 0.0
    prefill_read_ms_per_token: float = 0.0
    prefill_pair_ms: float = 0.0
    tile_tokens: int = 1
    stages: int = 1
    kv_tokens: int | None = None
    _tokens: Curve = field(init=False, repr=False, compare=False)
    _rows: Curve = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_points("tokens_ms", self.tokens_ms, least_number=1)
        _check_points("decode_rows_ms", self.decode_rows_ms, least_number=0)
        if self.decode_rows_ms[0][0] == 0 and self.decode_rows_ms[0][1] > 0:
            raise ValueError("decode_rows_ms: no decodes add nothing, so the point at 0 must be 0 ms")
        for name in ("decode_read_ms_per_token", "prefill_read_ms_per_token", "prefill_pair_ms"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: must be 0 or more, got {getattr(self, name)}")
        for name in ("tile_tokens", "stages", "kv_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: must be 1 or more, got {value}")
        object.__setattr__(self, "_tokens", Curve(self.tokens_ms))
        object.__setattr__(self, "_rows", Curve(self.decode_rows_ms))

    def step_ms(self, load: StepLoad) -> float:
        """Return how long a step of this load takes, in milliseconds."""
        if not load.tokens:
            return 0.0
        return (
            self._tokens(tiles(load.tokens, self.tile_tokens) * self.tile_tokens)
            + (self._rows(load.decode_rows) if load.decode_rows else 0.0)
            + self.decode_read_ms_per_token * load.decode_read_tokens
            + self.prefill_read_ms_per_token * load.prefill_read_tokens
            + self.prefill_pair_ms * load.prefill_pairs
        )


def tiles(tokens: int, tile_tokens: int) -> int:
    """Return how many tiles a kernel computes for so many tokens: the last one is paid whole."""
    return -(-tokens // tile_tokens)


def _check_points(name: str, points: Points, *, least_number: int) -> None:
    if not points:
        raise ValueError(f"{name}: has no point")
    for number, ms in points:
        if number < least_number or not 0 <= ms < float("inf"):
            raise ValueError(f"{name}: point ({number}, {ms}) is out of range")
    for (number, ms), (next_number, next_ms) in pairwise(points):
        if next_number <= number or next_ms < ms:
            raise ValueError(
                f"{name}: ({next_number}, {next_ms}) after ({number}, {ms}) must be to the right, not below"
            )
