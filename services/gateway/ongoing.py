"""A request under way, between the task that reads tokens and the one that writes to the client."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from services.gateway.answer import Accepted, Answer, Lost
from services.gateway.tokenizer import AnswerText
from shared.errors import GenerationFailed, ServingError
from shared.ids import WorkerId
from shared.protocol.messages import Finish, TokenRow

Ended = Literal["stop", "length"]
"""How a whole answer ended: by itself or at a stop string, or because it may not be longer."""


@dataclass(frozen=True, slots=True)
class News:
    """What has happened since the last news: never more than the answer itself, however slow the client is."""

    text: str
    completion_tokens: int
    finish: Ended | None
    error: ServingError | None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


class Ongoing:
    """One answer, its text, and how it ends."""

    def __init__(self, answer: Answer, text: AnswerText, *, started_s: float) -> None:
        self.answer = answer
        self.completion_tokens = 0
        self.finish: Ended | None = None
        self.error: ServingError | None = None
        self.started_s = started_s
        self.first_token_s: float | None = None
        self._text = text
        self._unread = ""
        self._changed = asyncio.Event()

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
        self._append(heard)
        return heard

    def end(self, finish: Finish) -> None:
        """Say that the accepted tokens are the whole answer."""
        if finish == "error":
            self.fail(GenerationFailed("the request failed in the worker"))
            return
        self._unread += self._text.end()
        self.finish = "stop" if self._text.stopped else finish
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        """End the answer here, with an error."""
        self.error = error
        self._changed.set()

    async def news(self) -> News:
        """Wait for something to tell, and return all of it. The caller bounds the wait."""
        await self._changed.wait()
        if not self.is_over:
            self._changed.clear()
        text, self._unread = self._unread, ""
        return News(text, self.completion_tokens, self.finish, self.error)

    def _append(self, accepted: Accepted) -> None:
        for index, token_id in enumerate(accepted.token_ids, start=1):
            self.completion_tokens += 1
            is_end = accepted.finish == "stop" and index == len(accepted.token_ids)
            if is_end and self.answer.wanted.is_ended_by(token_id):
                break  # it may be an ordinary word to the tokenizer
            self._unread += self._text.push(token_id)
            if self._text.stopped:
                self.end("stop")
                return
        if accepted.finish is not None:
            self.end(accepted.finish)
        elif accepted.token_ids:
            self._changed.set()
