"""A long computation beside everything else: what comes of it, and that no exit waits for it."""

import asyncio
import subprocess
import sys
import threading

import pytest

from services.worker.aside import aside

LEAVES = """
import asyncio, threading
from services.worker.aside import aside, leave_if_under_way

async def main():
    begun = threading.Event()
    waiting = asyncio.ensure_future(aside(lambda: (begun.set(), threading.Event().wait()), "long"))
    while not begun.is_set():
        await asyncio.sleep(0)
    waiting.cancel()
    print("in good order")
    leave_if_under_way()
    print("never said")

asyncio.run(main())
"""


async def test_what_it_returns_is_returned_from_another_thread() -> None:
    name = await aside(lambda: threading.current_thread().name, "beside")
    assert name == "beside"


async def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await aside(lambda: 1 // 0, "beside")


async def test_one_that_is_cancelled_is_left_to_itself() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(30)
        ended.set()

    waiting = asyncio.ensure_future(aside(work, "beside"))
    await asyncio.to_thread(begun.wait, 30)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 30)
    await asyncio.sleep(0)  # what it would have told has nobody to tell: that raises nothing


def test_a_process_ends_at_once_and_in_good_order_beside_one_that_nobody_awaits() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "in good order\n", "")
