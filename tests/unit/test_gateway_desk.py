"""Where answers are written as JSON."""

import asyncio
import threading

from services.gateway.desk import TOKENISED_AT_A_TIME, TOLD_AT_ONCE, Desk
from services.gateway.intake import Intake
from services.gateway.metrics import Metrics
from services.gateway.outbox import Outbox
from services.gateway.owed import Owed
from services.gateway.pool import Pool
from services.gateway.room import Counts, Room
from shared.runtime.clock import monotonic


async def no_line() -> int:
    raise AssertionError("nobody asks for it")


def desk_of_nobody() -> Desk:
    room = Room(1, no_line, Counts(lambda: 0, lambda: 0))
    return Desk("m", 0, Pool(), Owed(Outbox()), Metrics(), monotonic, room, Intake(1024), 1, 1, 1.0)


async def test_many_tokens_with_logprobs_are_not_written_on_the_loop_and_few_are() -> None:
    desk = desk_of_nobody()

    def write() -> bytes:
        return threading.current_thread().name.encode()

    here = write()
    assert await desk.written(TOLD_AT_ONCE, write) == here
    assert (await desk.written(TOLD_AT_ONCE + 1, write)).startswith(b"write")


async def test_what_is_written_in_a_thread_waits_for_no_text_that_is_tokenised() -> None:
    desk, go_on = desk_of_nobody(), threading.Event()
    tokenising = [desk._tokenising.submit(go_on.wait) for _ in range(TOKENISED_AT_A_TIME)]
    try:
        async with asyncio.timeout(10):
            assert await desk.written(TOLD_AT_ONCE + 1, lambda: b"told") == b"told"
        assert not any(one.done() for one in tokenising)
    finally:
        go_on.set()
