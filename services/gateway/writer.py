"""The one task that writes to ``requests``: one write in flight, so that nothing reorders."""

import asyncio
from collections.abc import Sequence

import structlog

from services.gateway.answer import Answer
from services.gateway.metrics import Metrics
from services.gateway.outbox import Cancel, Outbox, Submit
from services.gateway.owed import Owed
from shared.bus.port import Bus
from shared.errors import BusUnavailable, GenerationFailed, NotServing, Overloaded, ProtocolError
from shared.ids import EntryId, GatewayId
from shared.protocol import names
from shared.protocol.codec import encode
from shared.protocol.messages import CancelRequest, Message, SubmitRequest

RETRY_S = 0.2

log = structlog.get_logger()


class Writer:
    """Carries out the outbox. A new request that cannot be written fails; whatever is owed is written again."""

    def __init__(self, bus: Bus, model: str, *, max_queue: int, metrics: Metrics) -> None:
        self.outbox = Outbox()
        self.owed = Owed(self.outbox)
        self.gateway = GatewayId("")
        """The id under which tokens are asked for: the present life's."""
        self._bus = bus
        self._stream = names.requests(model)
        self._max_queue = max_queue
        self._metrics = metrics
        self._idle = asyncio.Event()
        self._in_hand = 0
        self._writing = asyncio.Lock()

    @property
    def unwritten(self) -> int:
        """Submissions and cancellations that have not been written yet."""
        return len(self.outbox) + self._in_hand

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            if not len(self.outbox):
                self._idle.set()
            order = await self.outbox.take()
            self._idle.clear()
            self._in_hand = 1
            try:
                await self._carry_out(order)
            except ProtocolError as error:  # no other answer must end for it
                log.exception("request_not_writable", request=order.request)
                for request in order.requests:
                    self.owed.fail(request, GenerationFailed(f"the request cannot be passed on: {error}"))
            except BusUnavailable as error:
                log.warning("write_unanswered", order=type(order).__name__, request=order.request, error=str(error))
                self.outbox.put_back(order)
                self._in_hand = 0
                await asyncio.sleep(RETRY_S)
            self._in_hand = 0

    async def line_length(self) -> int:
        """Return how many entries the waiting line has between two writes of ours. Raises BusUnavailable."""
        async with self._writing:
            return await self._bus.length(self._stream)

    async def flush(self, *, within_s: float) -> bool:
        """Wait until everything is written; False if it took longer."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.outbox):
                    self._idle.clear()
                    await self._idle.wait()
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _carry_out(self, order: Submit | Cancel) -> None:
        match order:
            case Submit():
                await self._submit(order)
            case Cancel():
                await self._enqueue([CancelRequest(order.request, order.attempt)], bound=None)

    async def _submit(self, order: Submit) -> None:
        answers = self._still_owed(order)
        if not answers:
            return
        attempts, is_new = [answer.attempt for answer in answers], not answers[0].arrival
        messages = [self._sent(answer) for answer in answers]
        try:
            entries = await self._enqueue(messages, bound=self._max_queue if is_new else None)
        except BusUnavailable as error:
            if not is_new:
                raise
            log.warning("request_not_written", requests=len(order.requests), error=str(error))
            for request in order.requests:  # not in the bus's words: they tell where it is
                self.owed.fail(request, NotServing("Redis does not answer: the request could not be written"))
            return
        if entries is None:
            self._refuse(order)
            return
        if is_new:
            self._metrics.prompted(sum(len(answer.wanted.prompt_ids) for answer in answers))
        for answer, attempt, entry in zip(answers, attempts, entries, strict=True):
            answer.submitted(attempt, entry)

    def _sent(self, answer: Answer) -> SubmitRequest:
        answer.is_sent = True
        return answer.submission(self.gateway)

    def _still_owed(self, order: Submit) -> list[Answer]:
        found = (self.owed.get(request) for request in order.requests)
        return [ongoing.answer for ongoing in found if ongoing is not None]

    def _refuse(self, order: Submit) -> None:
        """Refuse requests; if it was a single one, at once all newcomers behind it: the line was full after they came.

        Several that must all find room say nothing about a single one's chance.
        """
        behind = self.outbox.submissions() if len(order.requests) == 1 else ()
        for one in (*order.requests, *behind):
            ongoing = self.owed.get(one)
            if ongoing is not None and not ongoing.answer.arrival:
                self.owed.fail(one, Overloaded("the waiting line is full: try again"), is_known=False)

    async def _enqueue(self, messages: Sequence[Message], *, bound: int | None) -> tuple[EntryId, ...] | None:
        async with self._writing:
            return await self._bus.enqueue(self._stream, [encode(message) for message in messages], bound=bound)
