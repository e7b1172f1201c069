"""Black-box case BB-35: nothing is left of finished requests. Longer rounds are run by hand: tests/long/memory.py."""

from pathlib import Path

import pytest

from tests.end_to_end.left_over import check, one_round
from tests.end_to_end.served import FAKE
from tests.integration.processes import slipstream_up

REQUESTS, ROUNDS = 500, 5


@pytest.mark.timeout(180)
async def test_bb_35_requests_leave_nothing_in_any_process_nor_in_any_stream(short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE) as up:
        up.until_ready()
        rounds = [await one_round(up, REQUESTS) for _ in range(ROUNDS)]
        check(rounds, REQUESTS)
