"""Requests drawn over all parameters say the same streamed and whole, alone and with 16 others, in float32.

The short form is a test of tests/end_to_end/test_black_box_model.py. Prints every request whose answers differ, and
exits non-zero if those are more than one in a hundred comparisons: what is left to rounding where two tokens tie.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.worker.model_store import model_folder
from services.worker.progress import Progress
from shared.runtime.settings import DEFAULT_MODEL
from tests.end_to_end.asking import session_of
from tests.end_to_end.drawn_requests import Drawn, draw_requests
from tests.end_to_end.random_requests import Difference, differences
from tests.end_to_end.served import eventually, nothing_is_left
from tests.end_to_end.with_tools import NAME, model_with_tools
from tests.integration.processes import Up, slipstream_up

_AT_A_TIME = 50
_ROOM = ("--max-queue", "1024")
"""Nobody may be refused: 17 requests at once can be 255 answers, and as many cancellations when the company leaves."""


async def compare(up: Up, requests: Sequence[Drawn]) -> list[Difference]:
    """Compare so many at a time that what is found is told while it runs."""
    found = []
    async with session_of(up, timeout_s=1800) as session:
        for begin in range(0, len(requests), _AT_A_TIME):
            part = requests[begin : begin + _AT_A_TIME]
            differing = await differences(session, NAME, part)
            await eventually(nothing_is_left, up)
            print("\n".join([*map(str, differing), f"{begin + len(part)} requests, {len(differing)} differences"]))
            sys.stdout.flush()
            found += differing
    return found


def main(arguments: Sequence[str]) -> int:
    """Draw, ask and compare."""
    parser = argparse.ArgumentParser("python -m tests.long.random_requests", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer (default: 48)")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="ask only these of them")
    parser.add_argument("--up", default="", metavar="FLAGS", help="flags for `slipstream up`, in one word")
    wanted = parser.parse_args(arguments)
    requests = draw_requests(wanted.requests, wanted.seed, wanted.max_tokens, with_tools=True)
    requests = [drawn for drawn in requests if not wanted.only or drawn.number in wanted.only]
    with tempfile.TemporaryDirectory() as folder:
        model = model_with_tools(model_folder(DEFAULT_MODEL, Progress()), Path(folder))
        named = ("--model", str(model), "--served-model-name", NAME)
        flags = (*named, "--dtype", "float32", "--compile", "now", *_ROOM, *wanted.up.split())
        with slipstream_up(Path(folder), *flags) as up:
            up.until_ready(within_s=300)
            found = asyncio.run(compare(up, requests))
            is_hurt = "Traceback" in up.stderr
    comparisons = sum(3 if drawn.can_stream else 1 for drawn in requests)
    print(f"{len(requests)} requests, {comparisons} comparisons, {len(found)} differences")
    return int(is_hurt or len(found) > comparisons / 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
