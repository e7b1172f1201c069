"""What the HTTP side of a gateway works with: one request in, one answer out."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from services.gateway.asked import check, prompt_ids_of
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.choices import Choices, Heard
from services.gateway.door import Door
from services.gateway.fan_out import FanOut, Newcomer
from services.gateway.intake import Intake
from services.gateway.metrics import Metrics, Reason
from services.gateway.ongoing import Ongoing
from services.gateway.owed import Owed
from services.gateway.pool import Pool
from services.gateway.room import Room
from shared.errors import InvalidParameter, NotServing, RequestRejected, UnknownModel
from shared.runtime.clock import Clock
from shared.runtime.threads import Threads

TOKENISED_AT_A_TIME = 2
TOLD_AT_ONCE = 512
"""Tokens with logprobs that are written as JSON at once: about 1 ms, less than it takes to wait for a thread."""
TEXTS_AT_ONCE = 16
"""Texts that are here to be turned into tokens, or back, one by one; a seventeenth is told to come again."""
FIRST_NEWS_S = 10.0
"""A stream's status line goes out with its first token or error, at the latest after so long."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Desk:
    """Takes requests in and keeps count of how they end."""

    model: str
    created: int
    pool: Pool
    owed: Owed
    metrics: Metrics
    clock: Clock
    room: Room
    intake: Intake
    max_queue: int
    max_queued_tokens: int
    send_timeout_s: float
    texts: Door = field(default_factory=partial(Door, TEXTS_AT_ONCE))
    """Through which those go who want tokens and no answer."""
    _tokenising: Threads = field(default_factory=partial(Threads, TOKENISED_AT_A_TIME, "tokenise"))
    _writing: Threads = field(default_factory=partial(Threads, 1, "write"))
    """Apart from the tokenising: a stream that is under way must not wait for the seconds of somebody's long prompt."""

    async def take_in(self, body: ChatBody | CompletionBody, newcomer: Newcomer) -> Choices:
        """Check a request against the model and the pool. Raises RequestRejected or Unavailable: nothing was done."""
        check(body)
        newcomer.tenant.check_priority(body.priority)
        if body.model != self.model:
            raise UnknownModel(f"the model {body.model[:256]!r} does not exist here", param="model")
        tokenizer = self.pool.serving(self.clock())
        fan_out = FanOut(body, newcomer, tokenizer, self.pool.length_served, secrets.randbits(63))
        # In a thread: a long prompt or a large schema takes seconds, and the others' tokens must not wait for it.
        choices = await asyncio.get_running_loop().run_in_executor(self._tokenising, _made, fan_out)
        if len(choices.ongoings) > self.max_queue:
            least = f"{len(choices.ongoings)} answers are more than the waiting line holds ({self.max_queue})"
            raise InvalidParameter(f"n: {least}", param="n")
        self.pool.serving(self.clock())  # the drain may have begun meanwhile
        tokens = sum(len(ongoing.answer.wanted.prompt_ids) for ongoing in choices.ongoings)
        self.owed.queued.check_room(newcomer.tenant, tokens, self.max_queued_tokens)
        return choices

    async def all_answered(self) -> None:
        """Wait until no answer is owed, and nobody waits for tokens of a text. The caller bounds the wait.

        Who is being taken in is told, with its prompt turned into tokens, that it comes too late: so it is waited for.
        """
        await self.room.all_out()
        await self.owed.all_ended()
        await self.texts.all_out()

    async def written(self, told: int, write: Callable[[], bytes]) -> bytes:
        """Return what ``write`` makes of so many tokens with their logprobs: of many in a thread, for it takes long."""
        if told <= TOLD_AT_ONCE:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self._writing, write)

    async def first_news(self, choices: Choices) -> list[Heard]:
        """Wait for the first token; nothing if it takes long. Raises the error that an answer ended with."""
        try:
            async with asyncio.timeout(FIRST_NEWS_S):
                heard = await choices.news()
        except TimeoutError:
            if choices.is_in_line:
                return []
            error = NotServing("the request could not be put in line")
            for ongoing in choices.ongoings:
                self.owed.fail(ongoing.answer.wanted.request, error)
            raise error from None
        for one in heard:
            if one.news.error is not None:
                raise one.news.error
        return heard

    def close(self, choices: Choices, http_id: str) -> None:
        """Nobody waits for these answers any more: stop what still runs for them, count them, log them."""
        for ongoing in choices.ongoings:
            self._close(ongoing, http_id)

    def _close(self, ongoing: Ongoing, http_id: str) -> None:
        wanted = ongoing.answer.wanted
        self.owed.abandon(wanted.request)
        reason = _reason(ongoing)
        self.metrics.finished(reason)
        ttft_s = None if ongoing.first_token_s is None else round(ongoing.first_token_s - ongoing.started_s, 6)
        log.info(
            "request_finished",
            request=wanted.request,
            http_id=http_id,
            tokens=ongoing.completion_tokens,
            prompt_tokens=len(wanted.prompt_ids),
            ttft_s=ttft_s,
            reason=reason,
        )


def _made(fan_out: FanOut) -> Choices:
    return fan_out.choices(prompt_ids_of(fan_out.body, fan_out.tokenizer, fan_out.length_served))


def _reason(ongoing: Ongoing) -> Reason:
    if ongoing.error is not None:
        never_in_line = not ongoing.answer.arrival
        return "rejected" if never_in_line or isinstance(ongoing.error, RequestRejected) else "error"
    return ongoing.finish or "abort"
