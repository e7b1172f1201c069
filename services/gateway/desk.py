"""What the HTTP side of a gateway works with: one request in, one answer out."""

import asyncio
import secrets
from dataclasses import dataclass, field
from functools import partial

import structlog

from services.gateway.answer import Answer, Wanted
from services.gateway.asked import check, check_least, limits_of, prompt_ids_of, stops_of
from services.gateway.asked_sampling import sampling_of
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.door import Door
from services.gateway.intake import Intake
from services.gateway.metrics import Metrics, Reason
from services.gateway.ongoing import News, Ongoing
from services.gateway.owed import Owed
from services.gateway.pool import Pool
from services.gateway.tenants import Tenant
from services.gateway.tokenizer import AnswerText
from shared.errors import NotServing, RequestRejected, UnknownModel
from shared.ids import RequestId
from shared.runtime.clock import Clock

TOKENISED_AT_A_TIME = 2
FIRST_NEWS_S = 10.0
"""A stream's status line goes out with its first token or error, at the latest after so long."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What is known of a request beside its body."""

    request: RequestId
    tenant: Tenant
    started_s: float


@dataclass(frozen=True, slots=True)
class Desk:
    """Takes requests in and keeps count of how they end."""

    model: str
    created: int
    pool: Pool
    owed: Owed
    metrics: Metrics
    clock: Clock
    door: Door
    intake: Intake
    max_queued_tokens: int
    send_timeout_s: float
    tokenising: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, TOKENISED_AT_A_TIME))

    async def take_in(self, body: ChatBody | CompletionBody, newcomer: Newcomer) -> Ongoing:
        """Check a request against the model and the pool. Raises RequestRejected or Unavailable: nothing was done."""
        check(body)
        newcomer.tenant.check_priority(body.priority)
        if body.model != self.model:
            raise UnknownModel(f"the model {body.model[:256]!r} does not exist here", param="model")
        tokenizer = self.pool.serving(self.clock())
        # In a thread: a long prompt takes seconds, and the others' tokens must not wait for it.
        async with self.tokenising:
            prompt_ids = await asyncio.to_thread(prompt_ids_of, body, tokenizer, self.pool.length_served)
        max_tokens = limits_of(body, self.pool.length_served).max_tokens(len(prompt_ids))
        check_least(body, max_tokens)
        sampling = sampling_of(body, tokenizer, secrets.randbits(63))
        wanted = Wanted(
            newcomer.request,
            prompt_ids,
            max_tokens,
            sampling,
            body.ignore_eos,
            tokenizer.eos_ids,
            priority=body.priority,
            tenant=newcomer.tenant.name,
            cache_salt=body.cache_salt or "",
        )
        text = AnswerText(tokenizer.detokenizer(), stops_of(body), min_tokens=body.min_tokens)
        self.pool.serving(self.clock())  # the drain may have begun meanwhile
        self.owed.queued.check_room(newcomer.tenant, len(prompt_ids), self.max_queued_tokens)
        return Ongoing(Answer(wanted), text, started_s=newcomer.started_s)

    async def first_news(self, ongoing: Ongoing) -> News | None:
        """Wait for the first token; None if it takes long. Raises the error that the request ended with."""
        try:
            async with asyncio.timeout(FIRST_NEWS_S):
                news = await ongoing.news()
        except TimeoutError:
            if not ongoing.answer.arrival:
                error = NotServing("the request could not be put in line")
                self.owed.fail(ongoing.answer.wanted.request, error)
                raise error from None
            return None
        if news.error is not None:
            raise news.error
        return news

    def close(self, ongoing: Ongoing, http_id: str) -> None:
        """Nobody waits for this answer any more: stop what still runs for it, count it, log it."""
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


def _reason(ongoing: Ongoing) -> Reason:
    if ongoing.error is not None:
        never_in_line = not ongoing.answer.arrival
        return "rejected" if never_in_line or isinstance(ongoing.error, RequestRejected) else "error"
    return ongoing.finish or "abort"
