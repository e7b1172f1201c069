"""The long form of the planner's simulation under pressure: as many seeds as asked for, 500 by default.

Run by hand: ``python -m tests.long.pressure [SEEDS]``. Prints what was met under each policy and queue order; any
broken invariant ends it.
"""

import sys
from collections import Counter

from tests.simulation.test_planner_under_pressure import CORNERS, COURSES, Pressure


def main(seeds: int) -> None:
    """Run every policy under every queue order over all seeds."""
    for policy, order in COURSES:
        worst: Counter[int] = Counter()
        corners: Counter[str] = Counter()
        plans = 0
        for seed in range(seeds):
            pressure = Pressure(policy, seed, order=order)
            pressure.run()
            worst[max(pressure.rig.preempted.values(), default=0)] += 1
            corners.update(pressure.rig.corners)
            plans += len(pressure.rig.steps)
        print(f"{policy} {order}: {seeds} seeds, {plans} plans, most preemptions {dict(sorted(worst.items()))}")
        print("    " + ", ".join(f"{corner} {corners[corner]}" for corner in CORNERS), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
