import asyncio
from contextlib import suppress

import pytest

from services.gateway.door import Door
from shared.errors import Overloaded


def test_as_many_as_the_bound_are_let_through_and_the_next_is_told_at_once() -> None:
    door = Door(2)
    with door.passing(), door.passing(), pytest.raises(Overloaded), door.passing():
        raise AssertionError("a third one was let through")


def test_who_is_through_makes_place_whatever_came_of_it() -> None:
    door = Door(1)
    with pytest.raises(ValueError, match="a bad body"), door.passing():
        raise ValueError("a bad body")
    with door.passing():
        pass


async def test_who_waits_for_all_to_be_out_waits_for_the_last_and_not_for_those_who_were_not_let_in() -> None:
    door = Door(2)
    await door.all_out()
    async with asyncio.TaskGroup() as tasks:
        with door.passing():
            with door.passing(), suppress(Overloaded), door.passing():
                raise AssertionError("a third one was let through")
            waiting = tasks.create_task(door.all_out())
            await asyncio.sleep(0)
            assert not waiting.done()
