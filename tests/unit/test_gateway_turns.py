"""Turns: few in one iteration of the loop, in order, and nobody is kept who comes alone."""

import asyncio
from collections import Counter
from collections.abc import Callable

from services.gateway.turns import Turns


class Iterations:
    """Counts iterations of the running loop from now on."""

    def __init__(self) -> None:
        self.passed = 0
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self) -> None:
        self.passed += 1
        self._handle = self._loop.call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


async def test_as_many_as_may_go_at_once_go_and_the_next_goes_in_the_next_iteration() -> None:
    turns = Turns(2)
    assert [turns.take() for _ in range(3)] == [True, True, False]
    await asyncio.sleep(0)
    assert [turns.take() for _ in range(3)] == [True, True, False]


async def test_who_comes_alone_is_never_kept() -> None:
    turns = Turns(1)
    for _ in range(5):
        assert turns.take()
        await asyncio.sleep(0)


async def test_who_waits_is_called_in_order_and_few_in_each_iteration() -> None:
    turns, iterations = Turns(3), Iterations()
    called: list[tuple[int, int]] = []

    def hear(number: int) -> Callable[[], None]:
        return lambda: called.append((iterations.passed, number))

    while turns.take():
        pass
    for number in range(10):
        turns.wait(hear(number))
    for _ in range(5):
        await asyncio.sleep(0)
    iterations.stop()
    assert [number for _, number in called] == list(range(10))
    assert list(Counter(iteration for iteration, _ in called).values()) == [3, 3, 3, 1]


async def test_nobody_overtakes_those_who_wait() -> None:
    turns = Turns(1)
    called: list[str] = []
    assert turns.take()
    turns.wait(lambda: called.append("first"))
    turns.wait(lambda: called.append("second"))
    await asyncio.sleep(0)
    assert called == ["first"]
    assert not turns.take()


async def test_an_error_ends_one_turn_and_no_other() -> None:
    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(str(context["exception"])))
    turns = Turns(2)
    called: list[str] = []

    def fail() -> None:
        raise ValueError("of this one alone")

    assert turns.take()
    assert turns.take()
    for hear in (fail, lambda: called.append("second"), lambda: called.append("third")):
        turns.wait(hear)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (seen, called) == (["of this one alone"], ["second", "third"])
