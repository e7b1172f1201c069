"""Least squares in which no number may be negative."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that brings `matrix @ x` closest to `target` (Lawson and Hanson's method)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    x = np.zeros(scaled.shape[1])
    free = np.zeros(x.size, dtype=bool)
    for _ in range(10 * x.size):  # each round frees one number; it ends long before, unless rounding makes it circle
        pull = scaled.T @ (target - scaled @ x)
        pull[free] = -np.inf
        if pull.max() <= 1e-10:  # noqa: PLR2004 - columns and target are of size 1: this is rounding
            break
        free[pull.argmax()] = True
        x = _best_with(scaled, target, free, x)
    solution: Floats = x / scale
    return solution


def _best_with(matrix: Floats, target: Floats, free: npt.NDArray[np.bool_], x: Floats) -> Floats:
    """Return the best x whose free numbers are positive; those that would fall below 0 are freed no longer."""
    while free.any():
        wanted = np.zeros(x.size)
        wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        below = free & (wanted <= 0)
        if not below.any():
            return wanted
        x = x + (x[below] / (x[below] - wanted[below])).min() * (wanted - x)
        free &= x > 1e-12  # noqa: PLR2004 - as good as 0 beside numbers of size 1
        x[~free] = 0.0
    return x
