"""Where answers are written as JSON."""

import threading

from services.gateway.desk import TOLD_AT_ONCE, Desk
from services.gateway.intake import Intake
from services.gateway.metrics import Metrics
from services.gateway.outbox import Outbox
from services.gateway.owed import Owed
from services.gateway.pool import Pool
from services.gateway.room import Counts, Room
from shared.runtime.clock import monotonic


async def no_line() -> int:
    raise AssertionError("nobody asks for it")


async def test_many_tokens_with_logprobs_are_not_written_on_the_loop_and_few_are() -> None:
    room = Room(1, no_line, Counts(lambda: 0, lambda: 0))
    desk = Desk("m", 0, Pool(), Owed(Outbox()), Metrics(), monotonic, room, Intake(1024), 1, 1, 1.0)

    def write() -> bytes:
        return threading.current_thread().name.encode()

    here = write()
    assert await desk.written(TOLD_AT_ONCE, write) == here
    assert (await desk.written(TOLD_AT_ONCE + 1, write)).startswith(b"tokenise")
