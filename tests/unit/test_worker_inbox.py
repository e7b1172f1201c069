"""What a worker has read and not begun."""

import asyncio

import pytest

from services.worker.inbox import Inbox, Read
from shared.bus.port import Entry
from shared.ids import EntryId
from shared.protocol.messages import ClaimWorker

WITHIN_S = 5.0


def read(number: int) -> Read:
    return Read(Entry("plans", EntryId(f"{number}-0"), b""), ClaimWorker(str(number)), float(number))


async def test_the_head_is_looked_at_before_it_is_taken_and_order_is_kept() -> None:
    inbox = Inbox(2)
    for number in (1, 2):
        await inbox.put(read(number))
    assert (inbox.head, inbox.head, inbox.take(), inbox.take(), inbox.head) == (
        read(1),
        read(1),
        read(1),
        read(2),
        None,
    )


async def test_who_puts_waits_for_room() -> None:
    inbox = Inbox(1)
    await inbox.put(read(1))
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(inbox.put(read(2)))
        await asyncio.sleep(0)
        assert not waiting.done()
        inbox.take()
    assert inbox.head == read(2)


@pytest.mark.parametrize("what", ["put", "wake", "close"])
async def test_each_change_wakes_once_even_if_nobody_waited_yet(what: str) -> None:
    inbox = Inbox(1)
    match what:
        case "put":
            await inbox.put(read(1))
        case "wake":
            inbox.wake()
        case _:
            inbox.close()
    async with asyncio.timeout(WITHIN_S):
        await inbox.changed()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await inbox.changed()


async def test_a_closed_one_is_empty_for_ever() -> None:
    inbox = Inbox(2)
    await inbox.put(read(1))
    inbox.close()
    await inbox.put(read(2))
    assert (inbox.head, inbox.is_closed) == (None, True)
