"""Stop strings, matched on text across the borders of tokens, never shown in part."""

from collections.abc import Sequence


class _Pattern:
    """One stop string and how many of its characters the text so far ends with (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    @property
    def unfinished(self) -> int:
        """Characters at the end that could still become the stop string."""
        return self._fallback[-1] if self.matched == len(self.stop) else self.matched

    def step(self, character: str) -> bool:
        """Take one character and say whether the stop string is complete."""
        while self.matched and (self.matched == len(self.stop) or self.stop[self.matched] != character):
            self.matched = self._fallback[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


def _fallbacks(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(stop)
    length = 0
    for end in range(1, len(stop)):
        while length and stop[end] != stop[length]:
            length = lengths[length - 1]
        if stop[end] == stop[length]:
            length += 1
        lengths[end] = length
    return lengths


class StopMatcher:
    """Cuts text before the first stop string to be complete. Holds back only what could still become one.

    Character by character, so that the result does not depend on how the text was split into pieces. Of two that are
    complete at the same character the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return what may be shown now. Once ``stopped`` is set nothing more is.

        What is complete where it may not stop yet counts no more, though what has begun there may.
        """
        if self.stopped or not self._patterns:
            return "" if self.stopped else text
        before = len(self._held)
        self._held += text
        for end, character in enumerate(text, start=before + 1):
            complete = [len(pattern.stop) for pattern in self._patterns if pattern.step(character)]
            if complete and may_stop:
                return self._cut(end - max(complete))
        return self._release(len(self._held) - max(pattern.unfinished for pattern in self._patterns))

    def end(self) -> str:
        """Return what was held back: the text is over, it will not become a stop string any more."""
        return "" if self.stopped else self._release(len(self._held))

    def _cut(self, length: int) -> str:
        self.stopped = True
        return self._release(length)

    def _release(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown
