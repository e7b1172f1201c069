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
