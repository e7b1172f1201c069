"""The long form of the planner's simulation under pressure: as many seeds as asked for, 2,000 by default.

Run by hand: ``python -m tests.long.pressure [SEEDS]``. Prints a line per policy; any broken invariant ends it.
"""

import sys
from collections import Counter

from shared.scheduling.policies import POLICIES
from tests.simulation.test_planner_under_pressure import Pressure


def main(seeds: int) -> None:
    """Run every policy over all seeds."""
    for policy in POLICIES:
        worst: Counter[int] = Counter()
        steps = 0
        for seed in range(seeds):
            pressure = Pressure(policy, seed)
            pressure.run()
            worst[max(pressure.preemptions.values(), default=0)] += 1
            steps += len(pressure.steps)
        print(
            f"{policy:14} {seeds} seeds, {steps} plans, most preemptions of one request: {dict(sorted(worst.items()))}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
