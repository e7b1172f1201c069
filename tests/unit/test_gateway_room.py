"""Room in the waiting line: the bound is kept exactly, and nobody is refused while there is room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from services.gateway.room import Counts, Room
from shared.errors import BusUnavailable, Overloaded

WAIT_S = 5.0


class Rig:
    """A room with a line that answers when it is told to."""

    def __init__(self, bound: int) -> None:
        self.unwritten, self.without_token = 0, 0
        self.questions: asyncio.Queue[asyncio.Future[int]] = asyncio.Queue()
        self.room = Room(bound, self._length, Counts(lambda: self.unwritten, lambda: self.without_token))

    async def _length(self) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self.questions.put(answer)
        return await answer

    async def question(self) -> "asyncio.Future[int]":
        return await asyncio.wait_for(self.questions.get(), WAIT_S)

    async def enters(self, stack: AsyncExitStack) -> bool:
        """Tell whether one more is let in; it stays until the stack is closed."""
        try:
            await stack.enter_async_context(self.room.passing())
        except Overloaded:
            return False
        return True


@asynccontextmanager
async def rig(bound: int) -> AsyncIterator[tuple[Rig, AsyncExitStack, asyncio.TaskGroup]]:
    made = Rig(bound)
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        asking = tasks.create_task(made.room.run())
        yield made, stack, tasks
        asking.cancel()


async def test_while_fewer_than_the_bound_have_no_token_nobody_is_asked() -> None:
    async with rig(3) as (made, stack, _):
        made.without_token = 1
        assert [await made.enters(stack), await made.enters(stack)] == [True, True]
        assert made.questions.empty()


async def test_those_on_their_way_can_fill_the_line_by_themselves_and_nobody_is_asked() -> None:
    async with rig(3) as (made, stack, _):
        made.unwritten = made.without_token = 2
        assert [await made.enters(stack), await made.enters(stack)] == [True, False]
        assert made.questions.empty()


async def test_one_question_answers_all_who_came_and_lets_in_as_many_as_there_is_room_for() -> None:
    async with rig(5) as (made, stack, tasks):
        made.without_token, made.unwritten = 9, 1
        entering = [tasks.create_task(made.enters(stack)) for _ in range(6)]
        (await made.question()).set_result(2)
        assert [await one for one in entering] == [True, True, False, False, False, False]
        assert made.questions.empty()


async def test_who_comes_while_the_line_is_asked_waits_for_the_next_question() -> None:
    async with rig(2) as (made, stack, tasks):
        made.without_token = 2
        first = tasks.create_task(made.enters(stack))
        asked = await made.question()
        second = tasks.create_task(made.enters(stack))
        await asyncio.sleep(0)
        asked.set_result(2)
        assert not await first
        (await made.question()).set_result(1)
        assert await second


async def test_who_only_asks_whether_there_is_room_takes_it_from_nobody() -> None:
    async with rig(2) as (made, stack, tasks):
        made.without_token = 2
        asking = [tasks.create_task(made.room.check()) for _ in range(3)]
        entering = tasks.create_task(made.enters(stack))
        (await made.question()).set_result(1)
        await asyncio.gather(*asking)
        assert await entering
        with pytest.raises(Overloaded):
            await asyncio.gather(made.room.check(), _answer(made, 1))


async def _answer(made: Rig, length: int) -> None:
    (await made.question()).set_result(length)


async def test_who_has_passed_makes_place_whatever_came_of_it() -> None:
    async with rig(1) as (made, _, _):
        with pytest.raises(ValueError, match="a bad body"):
            async with made.room.passing():
                raise ValueError("a bad body")
        async with made.room.passing():
            pass


@pytest.mark.parametrize("iterations", range(4))
async def test_who_leaves_at_any_moment_takes_no_place_with_it(iterations: int) -> None:
    async with rig(2) as (made, stack, tasks):
        made.without_token = 2
        leaving = tasks.create_task(made.enters(stack))
        (await made.question()).set_result(1)
        for _ in range(iterations):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving], timeout=WAIT_S)
        await stack.aclose()
        staying = tasks.create_task(made.enters(stack))
        (await made.question()).set_result(1)
        assert await staying


async def test_who_waits_for_all_to_be_out_waits_for_those_who_ask_and_those_who_pass() -> None:
    async with rig(1) as (made, stack, tasks):
        await made.room.all_out()
        made.without_token = 1
        entering = tasks.create_task(made.enters(stack))
        question = await made.question()
        out = tasks.create_task(made.room.all_out())
        question.set_result(0)
        assert await entering
        assert not out.done()
        await stack.aclose()
        await asyncio.wait_for(out, WAIT_S)


async def test_a_line_that_does_not_answer_is_told_to_all_who_asked() -> None:
    async with rig(1) as (made, stack, tasks):
        made.without_token = 1

        async def is_told() -> None:
            with pytest.raises(BusUnavailable):
                await made.enters(stack)

        asking = [tasks.create_task(is_told()) for _ in range(2)]
        (await made.question()).set_exception(BusUnavailable("no answer"))
        await asyncio.gather(*asking)
        again = tasks.create_task(made.enters(stack))
        (await made.question()).set_result(0)
        assert await again
