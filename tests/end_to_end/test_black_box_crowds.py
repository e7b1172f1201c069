"""Black-box cases of many clients at once, by number. Their asked size is run by hand: tests/long/black_box.py."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.end_to_end.asking import serves, session_of
from tests.end_to_end.crowds import flood, leave_after_first_chunk, leave_again_and_again
from tests.end_to_end.served import FAKE
from tests.integration.processes import Up, slipstream_up

pytestmark = pytest.mark.timeout(120)

SLOTS, QUEUE = 8, 40


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    flags = ("--max-num-seqs", str(SLOTS), "--max-queue", str(QUEUE), "--fake-step-ms", "5")
    with TemporaryDirectory() as folder, slipstream_up(Path(folder), *FAKE, *flags) as running:
        yield running.until_ready()


async def test_bb_8_clients_that_leave_after_their_first_chunk_leave_nothing_behind(short_folder: Path) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "5", "--max-queue", "100") as roomy:
        await leave_after_first_chunk(roomy.until_ready(), 100)


async def test_bb_14_a_flood_gets_200_or_429_each_and_who_finds_the_line_full_is_told_at_once(up: Up) -> None:
    came = await flood(up, SLOTS, QUEUE, timed=30)
    assert came.refused > 0


async def test_bb_22_with_every_third_gone_the_queue_always_drains(up: Up) -> None:
    await leave_again_and_again(up, SLOTS, rounds=50)


async def test_bb_14_as_many_connections_as_come_at_once_wait_for_a_gateway_that_is_busy(up: Up) -> None:
    """A connection that the system drops is made again after a second, or reset: neither is an answer."""
    crowd = min(800, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    gateway = up.part("gateway")
    with ExitStack() as opened:
        os.kill(gateway, signal.SIGSTOP)
        try:
            for _ in range(crowd):
                opened.enter_context(socket.create_connection(up.address, timeout=0.8))
        finally:
            os.kill(gateway, signal.SIGCONT)
        async with session_of(up) as session:
            await serves(session, within_s=5)
    assert await asyncio.to_thread(Path(f"/proc/{gateway}").exists)
