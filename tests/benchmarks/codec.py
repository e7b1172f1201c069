"""Measure how long it takes to write and to read one plan of 256 slices: ``python tests/benchmarks/codec.py``."""

import statistics
import timeit

from shared.ids import BlockId, RequestId
from shared.protocol.codec import decode, encode
from shared.protocol.messages import Slice, StepPlan

SLICES = 256
ROUNDS = 200
CALLS_PER_ROUND = 5


def plan() -> StepPlan:
    """Return a step of decodes, every sixteenth of which gets a new block."""
    slices = (
        Slice(
            RequestId(f"cmpl-{number:032x}/0"),
            1000 + number,
            1,
            (BlockId(4000 + number),) if number % 16 == 0 else (),
        )
        for number in range(SLICES)
    )
    return StepPlan(epoch=3, step=1234, slices=tuple(slices))


def median_us(statement: str, names: dict[str, object]) -> float:
    """Return the median time of a statement in microseconds."""
    times_s = timeit.repeat(statement, globals=names, repeat=ROUNDS, number=CALLS_PER_ROUND)
    return statistics.median(times_s) / CALLS_PER_ROUND * 1e6


def main() -> None:
    """Print the medians."""
    message = plan()
    data = encode(message)
    names: dict[str, object] = {"encode": encode, "decode": decode, "message": message, "data": data}
    print(f"plan of {SLICES} slices, {len(data):,} bytes, median of {ROUNDS} rounds of {CALLS_PER_ROUND}:")
    print(f"  encode {median_us('encode(message)', names):8.1f} µs")
    print(f"  decode {median_us('decode(data)', names):8.1f} µs")


if __name__ == "__main__":
    main()
