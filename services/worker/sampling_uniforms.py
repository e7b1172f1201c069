"""Uniform numbers that depend on a seed and a position alone, so that a position that is computed again draws alike."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_TWO_TO_64 = 1 << 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_Numbers = npt.NDArray[np.uint64]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position): splitmix64, whose state is a counter."""
    seed = _mixed(np.array([seed % _TWO_TO_64 for seed in seeds], dtype=np.uint64))
    position = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = _mixed(seed + (position + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(numbers: _Numbers) -> _Numbers:
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
        numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    mixed: _Numbers = numbers ^ (numbers >> np.uint64(31))
    return mixed
