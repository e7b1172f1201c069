"""How long a client waits for its whole answer: one deadline for all answers to a request. Pure."""

from dataclasses import dataclass

from shared.errors import QueuedTooLong, TimedOut, Unavailable


@dataclass(slots=True)
class Deadline:
    """A moment after which nobody waits. ``has_begun``: some answer to the request has a token."""

    at_s: float
    timeout_s: float
    has_begun: bool = False

    def error(self) -> Unavailable:
        """Return what those are told whose deadline has passed."""
        if self.has_begun:
            return TimedOut(f"the answer was not whole within {self.timeout_s:g} s")
        return QueuedTooLong(f"there was no token within {self.timeout_s:g} s")
