"""How many requests a gateway takes in at a time: bodies in memory and submissions in hand have a bound as well."""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Overloaded


class Door:
    """Lets at most ``bound`` newcomers through that are not in the waiting line yet; the others are told at once."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._passing = 0

    @contextmanager
    def passing(self, unwritten: int) -> Iterator[None]:
        """Count a newcomer while its body is read and tokenised. Raises Overloaded, before that, if there are too many.

        ``unwritten`` are those who have been read and still wait to be written to the line.
        """
        if self._passing + unwritten >= self._bound:
            raise Overloaded("too many requests at once: try again")
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1
