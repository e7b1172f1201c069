"""All answers that this gateway owes, and what it does about news of them (DESIGN §4). No I/O: orders go to the outbox.

===========================  ==========================================================
news                         consequence
===========================  ==========================================================
tokens, accepted             text for the client; a stop string cancels the computation
tokens, a gap or two workers the attempt is lost: the next one is submitted
held, but not owed           cancelled, unless it ended since the last list
owed, read, but not held     the attempt is lost
refused                      the answer ends with an error
===========================  ==========================================================
"""

import asyncio

import structlog

from services.gateway.answer import Lost
from services.gateway.deadlines import Deadline
from services.gateway.ongoing import Ongoing
from services.gateway.outbox import Outbox
from services.gateway.queued import Queued, Waiting
from shared.errors import GenerationFailed, NotServing, PromptTooLong, ServingError
from shared.ids import START, RequestId, WorkerId
from shared.protocol.messages import Held, RequestRefused, TokenBatch, TokenRow

log = structlog.get_logger()


class Owed:
    """Requests from their submission until their answer is whole, failed, or nobody waits for it any more."""

    def __init__(self, outbox: Outbox) -> None:
        self.queued = Queued()
        self._outbox = outbox
        self._ongoing: dict[RequestId, Ongoing] = {}
        self._just_ended: set[RequestId] = set()
        self._nothing_owed = asyncio.Event()
        self._nothing_owed.set()

    def __len__(self) -> int:
        return len(self._ongoing)

    def get(self, request: RequestId) -> Ongoing | None:
        """Return a request that is owed."""
        return self._ongoing.get(request)

    async def all_ended(self) -> None:
        """Wait until nothing is owed. The caller bounds the wait."""
        await self._nothing_owed.wait()

    def add(self, *ongoings: Ongoing) -> None:
        """Owe answers: their requests are written next, all or none."""
        for ongoing in ongoings:
            wanted = ongoing.answer.wanted
            self._ongoing[wanted.request] = ongoing
            self.queued.join(wanted.request, Waiting(wanted.tenant, len(wanted.prompt_ids), ongoing.started_s))
        self._nothing_owed.clear()
        self._outbox.submit(*(ongoing.answer.wanted.request for ongoing in ongoings))

    def abandon(self, request: RequestId) -> None:
        """Nobody waits for an answer any more: stop its computation. Nothing happens if it is no longer owed."""
        ongoing = self._ongoing.get(request)
        if ongoing is not None:
            self._cancel(ongoing)

    def fail(self, request: RequestId, error: ServingError, *, is_known: bool = True) -> None:
        """End an answer with an error and stop its computation, if anybody but us can know of it."""
        ongoing = self._ongoing.get(request)
        if ongoing is None:
            return
        ongoing.fail(error)
        if is_known:
            self._cancel(ongoing)
        else:
            self._outbox.forget(request)
            self._ended(request)

    def end_overdue(self, now_s: float) -> list[Deadline]:
        """End every answer whose deadline has passed, and return these deadlines, each once."""
        passed: dict[int, Deadline] = {}
        for request, ongoing in list(self._ongoing.items()):
            deadline = ongoing.deadline
            if deadline is not None and deadline.at_s <= now_s:
                passed[id(deadline)] = deadline
                self.fail(request, deadline.error())
        return list(passed.values())

    def fail_all(self, error: ServingError) -> None:
        """End every answer with an error."""
        for request in list(self._ongoing):
            self.fail(request, error)

    def submit_all_again(self) -> None:
        """Submit whatever was written under an earlier id of this gateway: it is void."""
        for ongoing in list(self._ongoing.values()):
            if ongoing.answer.is_sent:
                self._submit_again(ongoing, blameless=True)

    def server_forgot(self) -> None:
        """Let nothing hang on a waiting line that is gone: write again what no worker is known to run.

        The others' entries count as read, so that the next list of what is held tells whether they are lost. What the
        leader knows all the same it drops as a copy.
        """
        for request, ongoing in self._ongoing.items():
            if ongoing.answer.entry is None:
                continue  # it is being written, to the server that there is now
            ongoing.answer.entry = START
            if not ongoing.answer.has_brought_tokens:
                self._outbox.submit(request)

    def hear_tokens(self, batch: TokenBatch, now_s: float) -> int:
        """Apply a batch and return how many tokens were new."""
        return sum(self._hear_row(batch.worker, row, now_s) for row in batch.rows)

    def hear_held(self, held: Held) -> None:
        """Submit again what got lost, cancel what nobody waits for."""
        attempts = {one.request: one.attempt for one in held.held}
        for request, attempt in attempts.items():
            if request not in self._ongoing and request not in self._just_ended:
                self._outbox.cancel(request, attempt)
        self._just_ended.clear()
        if held.read_to is None:
            return
        for request, ongoing in list(self._ongoing.items()):
            if ongoing.answer.is_missing(held.read_to, attempts.get(request)):
                self._lost(ongoing, Lost("not held"))

    def hear_refused(self, refused: RequestRefused) -> None:
        """End an answer whose present attempt the leader will not run."""
        ongoing = self._ongoing.get(refused.request)
        if ongoing is None or ongoing.answer.attempt != refused.attempt:
            return
        error = PromptTooLong(refused.message) if refused.code == "too_long" else NotServing(refused.message)
        self.fail(refused.request, error, is_known=False)

    def _hear_row(self, worker: WorkerId, row: TokenRow, now_s: float) -> int:
        ongoing = self._ongoing.get(row.request)
        if ongoing is None:
            return 0
        try:
            heard = ongoing.hear(worker, row, now_s)
        except Exception:  # one request's text must not end the others' streams
            log.exception("answer_failed", request=row.request)
            self.fail(row.request, GenerationFailed("the answer could not be turned into text"))
            return 0
        if isinstance(heard, Lost):
            self._lost(ongoing, heard)
            return 0
        if heard.token_ids:
            self.queued.leave(row.request)
        if ongoing.is_over and heard.finish is None:
            self._cancel(ongoing)  # a stop string: the worker does not know of it
        elif ongoing.is_over:
            self._ended(row.request)
        return len(heard.token_ids)

    def _lost(self, ongoing: Ongoing, lost: Lost) -> None:
        wanted = ongoing.answer.wanted
        log.warning("attempt_lost", request=wanted.request, attempt=ongoing.answer.attempt, why=lost.why)
        finish = ongoing.answer.complete()
        if finish is not None:
            ongoing.end(finish)
            self._cancel(ongoing)
        else:
            self._submit_again(ongoing)

    def _submit_again(self, ongoing: Ongoing, *, blameless: bool = False) -> None:
        request = ongoing.answer.wanted.request
        if ongoing.answer.try_again(blameless=blameless):
            self._outbox.submit(request)
        else:
            self.fail(request, GenerationFailed("three attempts in a row were lost without a new token"))

    def _cancel(self, ongoing: Ongoing) -> None:
        answer = ongoing.answer
        if answer.is_sent or answer.attempt > 1:
            self._outbox.cancel(answer.wanted.request, answer.attempt)
        else:
            self._outbox.forget(answer.wanted.request)
        self._ended(answer.wanted.request)

    def _ended(self, request: RequestId) -> None:
        self._just_ended.add(request)
        self.queued.leave(request)
        del self._ongoing[request]
        if not self._ongoing:
            self._nothing_owed.set()
