"""The answers to one HTTP request: to each of its prompts one or several, all of them requests of their own."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.gateway.formats import CachedTokens, Usage
from services.gateway.ongoing import News, Ongoing
from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class Heard:
    """News of one answer; ``place`` is where it stands among all that are computed."""

    place: int
    news: News


class Choices:
    """Answers that are computed, ``each`` of them for a prompt, of which the best ``n`` are told."""

    def __init__(self, request: RequestId, ongoings: Sequence[Ongoing], *, n: int = 1, each: int = 1) -> None:
        self.request = request
        self.ongoings = tuple(ongoings)
        self._n, self._each = n, each
        self._bell = asyncio.Event()
        for ongoing in self.ongoings:
            ongoing.bell = self._bell

    @property
    def is_in_line(self) -> bool:
        """Whether they have been put into the waiting line: all of them, or none."""
        return bool(self.ongoings[0].answer.arrival)

    async def news(self) -> list[Heard]:
        """Wait for news of any answer and return all there is. The caller bounds the wait."""
        while not (heard := list(self._heard())):
            self._bell.clear()
            await self._bell.wait()
        return heard

    def usage(self) -> Usage:
        """Return what all of it has cost so far: each prompt counts once, all answers count, told or not."""
        firsts = self.ongoings[:: self._each]
        prompt_tokens = sum(len(one.answer.wanted.prompt_ids) for one in firsts)
        completion_tokens = sum(one.completion_tokens for one in self.ongoings)
        cached = CachedTokens(sum(one.answer.cached_tokens for one in firsts))
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached)

    def best(self) -> list[int]:
        """Return the places of those that are told, in their order: of each prompt's those likeliest by token."""
        places = range(len(self.ongoings))
        if self._n == self._each:
            return list(places)
        return [
            place
            for first in places[:: self._each]
            for place in sorted(places[first : first + self._each], key=self._unlikeliness)[: self._n]
        ]

    def _heard(self) -> Iterator[Heard]:
        for place, ongoing in enumerate(self.ongoings):
            news = ongoing.take()
            if news is not None:
                yield Heard(place, news)

    def _unlikeliness(self, place: int) -> float:
        ongoing = self.ongoings[place]
        return -ongoing.logprob / max(ongoing.completion_tokens, 1)
