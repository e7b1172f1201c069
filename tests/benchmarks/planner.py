"""What a plan costs: 256 requests running, 1,000 waiting, and half and twice as many, to see that it grows linearly.

Run from the root of the project: ``python -m tests.benchmarks.planner``. Ends within a few seconds.
"""

import platform
import statistics
import sys
import time

from shared.ids import RequestId, WorkerId
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling.limits import Limits
from shared.scheduling.planner import Outcome, Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Step

PLANS = 200
NAME = WorkerId("w")


def pool_of(policy: str, running: int, waiting: int) -> Planner:
    """Return a planner whose running requests decode, and whose waiting ones find no place."""
    planner = Planner(POLICIES[policy], Limits(64 * running, running), KV_MANAGERS["paged"])
    planner.add_worker(WorkerView(NAME, BlockPool(64 * running, 16), max_model_len=1024))
    for number in range(running + waiting):
        planner.submit(Request(RequestId(f"r{number:05}"), 1, (number, 0), 64, 900))
    while len(planner.state.workers[NAME].running) < running:
        settle(planner, planner.next_step(NAME))
    return planner


def settle(planner: Planner, step: Step) -> None:
    """Answer a step as a worker would: everybody goes on."""
    planner.settle(NAME, [Outcome(slice_.request, 1, ended=False) for slice_ in step.slices])


def median_ms(policy: str, running: int, waiting: int) -> float:
    """Return the median time of one plan."""
    planner = pool_of(policy, running, waiting)
    times = []
    for _ in range(PLANS):
        begun = time.perf_counter()
        step = planner.next_step(NAME)
        times.append(time.perf_counter() - begun)
        settle(planner, step)
    return statistics.median(times) * 1000


def main() -> None:
    """Print a table."""
    print(f"{platform.processor() or platform.machine()}, Python {sys.version.split()[0]}, median of {PLANS} plans, ms")
    sizes = ((128, 500), (256, 1000), (512, 2000))
    print(f"{'policy':14}" + "".join(f"{f'{running}+{waiting}':>12}" for running, waiting in sizes))
    for policy in POLICIES:
        row = "".join(f"{median_ms(policy, running, waiting):12.3f}" for running, waiting in sizes)
        print(f"{policy:14}{row}")


if __name__ == "__main__":
    main()
