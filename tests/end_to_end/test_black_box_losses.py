"""Black-box case BB-12: a worker is killed, or stopped, under 16 streams. Other parts: test_parts_that_die.py.

With no worker for a minute each stream ends with one error: that takes its minute, in tests/long/black_box.py.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.end_to_end.asking import serves, session_of
from tests.end_to_end.served import FAKE, eventually, nothing_is_left
from tests.end_to_end.undisturbed import expected_texts, texts_across
from tests.integration.processes import slipstream_up

pytestmark = pytest.mark.timeout(120)

STREAMS, TOKENS = 16, 100
EXPECTED = expected_texts(STREAMS, TOKENS)


class Readiness:
    """What /ready has said so far, without repeats, and somebody who asks whether it said a status since."""

    def __init__(self) -> None:
        self.said = [200]
        self._changed = asyncio.Condition()

    async def watch(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get("/ready") as response, self._changed:
                if response.status != self.said[-1]:
                    self.said.append(response.status)
                    self._changed.notify_all()
            await asyncio.sleep(0.02)

    async def until(self, *said: int) -> None:
        """Wait until exactly this has been said."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.said == list(said))


@asynccontextmanager
async def watched(session: aiohttp.ClientSession) -> AsyncIterator[Readiness]:
    ready = Readiness()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(ready.watch(session))
        yield ready
        watching.cancel()


async def test_bb_12_streams_go_on_across_the_kill_of_the_only_worker_and_ready_says_so_meanwhile(
    short_folder: Path,
) -> None:
    with slipstream_up(short_folder, *FAKE, "--fake-step-ms", "15") as up:
        up.until_ready()
        async with session_of(up) as session, watched(session) as ready:
            texts = await texts_across(up, lambda: os.kill(up.part("worker"), signal.SIGKILL), STREAMS, TOKENS)
            assert texts == EXPECTED
            await ready.until(200, 503, 200)
            await serves(session)
            found = await eventually(nothing_is_left, up)
        assert found['slipstream_requests_finished_total{reason="error"}'] == 0
        assert [event["part"] for event in up.events("part_died")] == ["worker"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_bb_12_streams_go_on_across_a_worker_that_stops_for_so_long_that_it_is_given_up(
    workers: int, short_folder: Path
) -> None:
    flags = ("--fake-step-ms", "15", "--workers", str(workers))
    with slipstream_up(short_folder, *FAKE, *flags) as up:
        up.until_ready()
        async with session_of(up) as session, watched(session) as ready:
            stopped = up.running("worker")[0]
            reading = asyncio.ensure_future(texts_across(up, lambda: os.kill(stopped, signal.SIGSTOP), STREAMS, TOKENS))
            if workers == 1:
                await ready.until(200, 503)
                os.kill(stopped, signal.SIGCONT)
                await ready.until(200, 503, 200)
            assert await reading == EXPECTED
            assert ready.said == ([200, 503, 200] if workers == 1 else [200]), "the other one is there all the time"
            os.kill(stopped, signal.SIGCONT)
            await serves(session)
            await eventually(nothing_is_left, up)
        assert [event["why"] for event in up.events("worker_lost")] == ["its heart stopped"]
        assert not up.events("part_died"), "and nobody had to be started again"
