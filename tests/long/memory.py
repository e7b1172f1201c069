"""Black-box case BB-35: what a finished request leaves in memory, of every process and of the server: nothing.

Run by hand: ``python -m tests.long.memory [ROUNDS]``, 5 by default, each of 1,000 requests of 8 tokens. Prints what
there is after each round; exits non-zero if a process has grown by more than 1 KB per request, or a stream has entries
left. The short form is tests/end_to_end/test_black_box_memory.py.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.end_to_end.left_over import Left, check, one_round
from tests.end_to_end.served import FAKE
from tests.integration.processes import slipstream_up

REQUESTS = 1000


def main(rounds: int) -> int:
    """Return 0 if nobody has grown."""
    with tempfile.TemporaryDirectory() as name, slipstream_up(Path(name), *FAKE) as up:
        up.until_ready()
        found: list[Left] = []
        for number in range(rounds):
            found.append(asyncio.run(one_round(up, REQUESTS)))
            print(f"after {(number + 1) * REQUESTS} requests: {found[-1]}", flush=True)
        try:
            growth = check(found, REQUESTS)
        except AssertionError as error:
            print(error)
            return 1
    print("KB per request: " + ", ".join(f"{name} {kb:.2f}" for name, kb in growth.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
