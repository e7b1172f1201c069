"""What a queue order must answer."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from shared.scheduling.request import Request

Place = tuple[float, tuple[int, int], str]
"""What a queue order sorts by: its own measure, then arrival, and the id where two have the same."""


class QueueOrder(Protocol):
    """The waiting line in its order. Who was preempted returns to the place that it had."""

    @property
    def takes_places(self) -> bool:
        """True if one who waits may take the place of one who runs and is less urgent."""

    def __len__(self) -> int:
        """Return how many wait."""

    def __iter__(self) -> Iterator[Request]:
        """Yield who waits, the next first; who has been yielded may be removed meanwhile."""

    def add(self, request: Request) -> None:
        """Put a request in its place."""

    def remove(self, request: Request) -> None:
        """Take a request out. Raises ValueError if it is not there."""

    def place(self, request: Request) -> Place:
        """Return where a request stands among those who run; it does not change while a step is planned."""

    def sort(self, running: list[Request]) -> None:
        """Put those who run on one worker in order, before a step is planned for it."""

    def charge_prompt(self, request: Request, tokens: int, *, overtakes: bool) -> None:
        """Note that a newcomer is admitted, and how much of its prompt must be computed.

        ``overtakes``: somebody who stood before it was offered a place in this step and is still waiting.
        """

    def charge_output(self, requests: Sequence[Request]) -> None:
        """Note that each of these gets one more token."""
