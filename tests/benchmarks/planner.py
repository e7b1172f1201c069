"""What a plan costs: 256 requests running, 1,000 waiting, and half and twice as many, to see that it grows linearly.

Run from the root of the project: ``python -m tests.benchmarks.planner [POLICY ...]``. Takes about 20 s for each policy.
Prompts of those who wait are 2,000 tokens long and are looked up in the prefix cache; no two requests have one tenant.
Printed are processor milliseconds of the planning thread, so that other load on the machine does not count: the median,
the 99th percentile, and the first plan, which hashes the prompts that it looks at.
"""

import platform
import statistics
import sys
import time
from dataclasses import dataclass

from shared.ids import RequestId, WorkerId
from shared.paging.block_hash import TokenPrefix
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling.limits import Limits
from shared.scheduling.orders import ORDERS
from shared.scheduling.planner import Outcome, Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Step

PLANS = 120
SIZES = ((128, 500), (256, 1000), (512, 2000))
NAME = WorkerId("w")
PROMPT, BLOCK = 2000, 16


@dataclass(frozen=True, slots=True)
class Course:
    """What keeps those who wait from running."""

    name: str
    order: str
    seats_beyond: int = 0
    """Seats beside those who run: then it is the tokens of a step that are short."""
    long_prefill_tokens: int = 0


COURSES = (
    *(Course(f"{order}, no seat", order) for order in ORDERS),
    *(Course(f"{order}, seats", order, seats_beyond=8) for order in ORDERS),
    Course("fcfs, long prompts passed over", "fcfs", seats_beyond=8, long_prefill_tokens=128),
)


def request(number: int, prompt: int, max_tokens: int) -> Request:
    """Return a request with a prompt that shares its first half with every third one."""
    half = prompt // 2
    tokens = [number % 3] * half + list(range(1000 * number, 1000 * number + prompt - half))
    return Request(
        RequestId(f"r{number:05}"),
        1,
        (number, 0),
        prompt,
        max_tokens,
        priority=number % 4,
        tenant=f"t{number}",
        prefix=TokenPrefix(tokens),
    )


def pool_of(policy: str, course: Course, running: int, waiting: int) -> Planner:
    """Return a planner whose running requests decode, and whose waiting ones have just come."""
    planner = Planner(POLICIES[policy], Limits(64 * running, running), KV_MANAGERS["paged"], ORDERS[course.order]())
    planner.add_worker(WorkerView(NAME, BlockPool(160 * running, BLOCK), max_model_len=2560))
    for number in range(running):
        planner.submit(request(number, 64, 900))
    while len(planner.state.workers[NAME].running) < running:
        settle(planner, planner.next_step(NAME))
    planner.limits = Limits(2 * running, running + course.seats_beyond, course.long_prefill_tokens)
    planner.add_worker(planner.state.workers[NAME])
    for number in range(running, running + waiting):
        planner.submit(request(number, PROMPT, 100))
    return planner


def settle(planner: Planner, step: Step) -> None:
    """Answer a step as a worker would: everybody goes on, and what was drawn is known."""
    for slice_ in step.slices:
        prefix = planner.state.requests[slice_.request].prefix
        if slice_.samples and isinstance(prefix, TokenPrefix):
            prefix.append((7,))
    planner.settle(NAME, [Outcome(slice_.request, 1, ended=False) for slice_ in step.slices])


def milliseconds(policy: str, course: Course, running: int, waiting: int) -> list[float]:
    """Return the time of each plan."""
    planner = pool_of(policy, course, running, waiting)
    times = []
    for _ in range(PLANS):
        begun = time.thread_time()
        step = planner.next_step(NAME)
        times.append((time.thread_time() - begun) * 1000)
        settle(planner, step)
    return times


def main(policies: list[str]) -> None:
    """Print a table."""
    print(f"{platform.processor() or platform.machine()}, Python {sys.version.split()[0]}")
    print(f"{PLANS} plans, processor ms: median / 99th percentile / the first")
    print(f"{'':46}" + "".join(f"{f'{running}+{waiting}':>24}" for running, waiting in SIZES))
    for policy in policies or POLICIES:
        for course in COURSES:
            cells = []
            for running, waiting in SIZES:
                times = milliseconds(policy, course, running, waiting)
                worst = statistics.quantiles(times, n=100)[-1]
                cells.append(f"{statistics.median(times):.3f} / {worst:.2f} / {times[0]:.1f}")
            print(f"{policy:14}{course.name:32}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
