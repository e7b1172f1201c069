"""When requests are sent in an open loop: pure functions of a seed."""

import numpy as np

from loadgen.lengths import Seed


def poisson_times_s(rate_per_s: float, seed: Seed, *, limit: int, duration_s: float) -> list[float]:
    """Return the arrival times of a Poisson process in seconds after the start: at most `limit`, all before the end.

    The gaps are exponential and left as drawn. Stretching them until they fill the duration, as other clients do,
    takes the noise out of the rate and leaves a process that is Poisson no more.
    """
    gaps_s = np.random.default_rng(seed).exponential(1 / rate_per_s, size=limit)
    times_s = np.cumsum(gaps_s)
    return [float(time_s) for time_s in times_s[times_s < duration_s]]
