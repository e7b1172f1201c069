"""A request under way, between the task that reads tokens and the one that writes to the client."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.gateway.answer import Accepted, Answer, Lost
from services.gateway.deadlines import Deadline
from services.gateway.echo import Echo
from services.gateway.tokenizer import AnswerText
from services.gateway.told import Telling, Told
from services.gateway.tool_reading import Reading, ToldCall
from shared.errors import GenerationFailed, ServingError
from shared.ids import WorkerId
from shared.protocol.messages import Finish, Logprobs, TokenRow

Ended = Literal["stop", "length"]
"""How a whole answer ended: by itself or at a stop string, or because it may not be longer."""


@dataclass(frozen=True, slots=True)
class News:
    """What has happened since the last news: never more than the answer itself, however slow the client is."""

    text: str
    completion_tokens: int
    finish: Ended | Literal["tool_calls"] | None
    error: ServingError | None
    told: tuple[Told, ...] = ()
    """Tokens with their logprobs, if the answer tells any."""
    calls: tuple[ToldCall, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


class Ongoing:
    """One answer, its text, and how it ends."""

    def __init__(self, answer: Answer, text: AnswerText, *, started_s: float, telling: Telling | None = None) -> None:
        self.answer = answer
        self.completion_tokens = 0
        self.logprob = 0.0
        """The sum over all tokens, if the worker tells logprobs."""
        self.finish: Ended | None = None
        self.error: ServingError | None = None
        self.started_s = started_s
        self.first_token_s: float | None = None
        self.bell = asyncio.Event()
        """Rings when there is news; several answers may share one."""
        self.deadline: Deadline | None = None
        """When nobody waits any more; all answers to a request share one."""
        self.reading: Reading | None = None
        """How calls of tools are told from content, if tools may be called."""
        self.echo: Echo | None = None
        """What comes before the answer, if anything does: told with the first news, of which there are none before."""
        self._text = text
        self._telling = telling
        self._is_echoed = False
        self._unread = ""
        self._untold: list[Told] = []
        self._has_news = False

    @property
    def is_over(self) -> bool:
        """Whether the answer is whole or has failed."""
        return self.finish is not None or self.error is not None

    def hear(self, worker: WorkerId, row: TokenRow, now_s: float) -> Accepted | Lost:
        """Accept what is new of a row and say what it was."""
        heard = self.answer.accept(worker, row)
        if isinstance(heard, Lost):
            return heard
        if heard.token_ids and self.first_token_s is None:
            self.first_token_s = now_s
            if self.deadline is not None:
                self.deadline.has_begun = True
        if self._is_prompt_only:
            # No step ends without a token, so the worker was asked for one. Of several answers each is, of which all
            # but the first find the prompt cached: no way of its own for what is rarely asked for.
            heard = replace(heard, token_ids=(), logprobs=())
        self._append(heard)
        return heard

    def end(self, finish: Finish) -> None:
        """Say that the accepted tokens are the whole answer."""
        if finish == "error":
            self.fail(GenerationFailed("the request failed in the worker"))
            return
        self._unread += self._text.end()
        self.finish = "stop" if self._text.stopped else finish
        if self._is_prompt_only:
            self.finish = "length"
        if self._telling is not None:
            self._untold += self._telling.rest(self._text.shown, is_cut=self._text.stopped)
        self._ring()

    def fail(self, error: ServingError) -> None:
        """End the answer here, with an error."""
        self.error = error
        self._ring()

    def take(self) -> News | None:
        """Return all that has happened since the last news; None if nothing has that can be told."""
        if not self._has_news or self._must_wait:
            return None
        self._has_news = False
        text, self._unread = self._unread, ""
        told, self._untold = tuple(self._untold), []
        if self.echo is not None and not self._is_echoed:
            self._is_echoed = True
            text, told = self.echo.text + text, (*self.echo.told, *told)
        if self.reading is None:
            return News(text, self.completion_tokens, self.finish, self.error, told)
        content, calls = self.reading.read(text, is_over=self.finish is not None)
        # one that was cut off may end in a call that is not whole, and has to say so
        is_called = self.finish == "stop" and self.reading.has_calls
        finish = "tool_calls" if is_called else self.finish
        return News(content, self.completion_tokens, finish, self.error, told, calls)

    async def news(self) -> News:
        """Wait for something to tell, and return all of it. The caller bounds the wait."""
        while (news := self.take()) is None:
            self.bell.clear()
            await self.bell.wait()
        return news

    @property
    def _must_wait(self) -> bool:
        """Whether what comes first is not known yet: another answer to the same prompt will hear of it."""
        return self.error is None and self.echo is not None and not self.echo.is_whole

    @property
    def _is_prompt_only(self) -> bool:
        return self.echo is not None and self.echo.is_all

    def _ring(self) -> None:
        self._has_news = True
        self.bell.set()

    def _hear_of_prompt(self, logprobs: Sequence[Logprobs]) -> None:
        if self.echo is not None and logprobs:
            self.echo.hear(logprobs)
            if self.echo.is_whole:
                self._ring()  # for the other answers as well, whose news may have waited for it

    def _append(self, accepted: Accepted) -> None:
        self._hear_of_prompt(accepted.of_prompt)
        for index, token_id in enumerate(accepted.token_ids, start=1):
            self.completion_tokens += 1
            logprobs = accepted.logprobs[index - 1] if accepted.logprobs else None
            self.logprob += logprobs.logprob if logprobs else 0.0
            is_end = accepted.finish == "stop" and index == len(accepted.token_ids)
            if is_end and self.answer.wanted.is_ended_by(token_id):
                break  # it may be an ordinary word to the tokenizer
            self._push(token_id, logprobs)
            if self._text.stopped:
                self.end("stop")
                return
        if accepted.finish is not None:
            self.end(accepted.finish)
        elif accepted.token_ids:
            self._ring()

    def _push(self, token_id: int, logprobs: Logprobs | None) -> None:
        begin = self._text.characters
        self._unread += self._text.push(token_id)
        if self._telling is not None and logprobs is not None:
            self._telling.push(token_id, logprobs, begin, self._text.characters)
            self._untold += self._telling.shown(self._text.shown)
