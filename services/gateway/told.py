"""Which tokens of an answer are told with their logprobs, and when: with the text that they are a part of."""

from collections import deque
from dataclasses import dataclass

from services.gateway.token_texts import TokenText, TokenTexts
from shared.protocol.messages import Logprobs


@dataclass(frozen=True, slots=True)
class Ranked:
    """One of the likeliest tokens at a place."""

    token: TokenText
    logprob: float


@dataclass(frozen=True, slots=True)
class Told:
    """A token of the answer; ``offset`` is where its text begins, in characters of all that is shown.

    ``logprob`` is None for the first token of a prompt: there is nothing that it could follow.
    """

    token: TokenText
    logprob: float | None
    top: tuple[Ranked, ...]
    offset: int


def told_of(texts: TokenTexts, token_id: int, logprobs: Logprobs, offset: int) -> Told:
    """Return a token with what the worker tells of it."""
    top = tuple(Ranked(texts.of(one.token_id), one.logprob) for one in logprobs.top)
    return Told(texts.of(token_id), logprobs.logprob, top, offset)


class Telling:
    """Holds tokens back until their text is shown, so that a stream tells the same of each piece as of the whole.

    ``before`` characters of a prompt are shown before the answer.
    """

    def __init__(self, texts: TokenTexts, *, before: int = 0) -> None:
        self._texts = texts
        self._before = before
        self._waiting: deque[tuple[Told, int]] = deque()

    def push(self, token_id: int, logprobs: Logprobs, begin: int, end: int) -> None:
        """Take a token whose text lies between two characters of the answer."""
        self._waiting.append((told_of(self._texts, token_id, logprobs, self._before + begin), end))

    def shown(self, characters: int) -> list[Told]:
        """Return the tokens that have been shown whole since the last call."""
        told = []
        while self._waiting and self._waiting[0][1] <= characters:
            told.append(self._waiting.popleft()[0])
        return told

    def rest(self, characters: int, *, is_cut: bool) -> list[Told]:
        """Return the tokens that are left when the answer is over; of one cut by a stop string, those with text in it.

        That of the last of them may be cut as well.
        """
        left = [told for told, _ in self._waiting if not is_cut or told.offset < self._before + characters]
        self._waiting.clear()
        return left
