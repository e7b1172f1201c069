"""The two routes that generate: read, admit, and write the answer as one object or as a stream."""

import secrets
from functools import partial
from typing import Generic, TypeVar

import structlog
from aiohttp import web

from services.gateway.access import tenant_at
from services.gateway.asked import told_logprobs
from services.gateway.bodies import ChatBody, CompletionBody, StreamOptions, read_body
from services.gateway.choices import Choices, Heard
from services.gateway.desk import Desk
from services.gateway.errors import envelope
from services.gateway.fan_out import Newcomer
from services.gateway.formats import FinishReason, Format, Head, Piece, Whole, to_json
from services.gateway.ongoing import News
from services.gateway.request_ids import request_id_of
from services.gateway.sse import EventStream
from services.gateway.told import Told
from services.gateway.tool_reading import ToldCall
from shared.errors import GenerationFailed
from shared.ids import RequestId
from shared.runtime.clock import wall_clock_s

log = structlog.get_logger()

_Body = TypeVar("_Body", bound=ChatBody | CompletionBody)


class Generation(Generic[_Body]):
    """One route: the type of its body, how it writes answers, what its ids begin with."""

    def __init__(self, desk: Desk, body: type[_Body], form: Format, prefix: str) -> None:
        self._desk = desk
        self._body = body
        self._form = form
        self._prefix = prefix

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. Whatever happens, its computation ends with it.

        With a full line it is refused before its body is looked at: a 429, also for one that would be a 400 otherwise.
        """
        try:
            body, choices = await self._take_in(request)
        except Exception:
            self._desk.metrics.finished("rejected")
            raise
        try:
            return await self._answer(request, body, choices)
        finally:
            self._desk.close(choices, request_id_of(request))

    async def _take_in(self, request: web.Request) -> tuple[_Body, Choices]:
        """Read, check and submit a request. It has a place from the moment at which its body is there."""
        desk, started_s = self._desk, self._desk.clock()
        if not request.content.is_eof():  # who would be refused is told before he has sent it all
            await desk.room.check()
        async with desk.intake.received(request) as data, desk.room.passing():
            body = await desk.intake.decoded(data, partial(read_body, self._body))
            own_id = RequestId(f"{self._prefix}-{secrets.token_hex(12)}")
            choices = await desk.take_in(body, Newcomer(own_id, tenant_at(request), started_s))
            desk.owed.add(*choices.ongoings)
        return body, choices

    async def _answer(self, request: web.Request, body: _Body, choices: Choices) -> web.StreamResponse:
        options = body.stream_options or StreamOptions()
        head = Head(
            choices.request,
            wall_clock_s(),
            self._desk.model,
            has_usage=options.include_usage,
            counts=options.continuous_usage_stats,
            tells_logprobs=told_logprobs(body) is not None,
        )
        heard = await self._desk.first_news(choices)
        if body.stream:
            return await self._stream(request, head, choices, heard)
        return await self._whole(head, choices, heard)

    async def _whole(self, head: Head, choices: Choices, heard: list[Heard]) -> web.Response:
        gathered = [Gathered() for _ in choices.ongoings]
        left = len(gathered)
        while left:
            for one in heard:
                if one.news.error is not None:
                    raise one.news.error
                gathered[one.place].add(one.news)
                left -= one.news.is_last
            heard = await choices.news() if left else []  # bounded: the watch ends every answer in the end
        told = [gathered[place].whole(index, head) for index, place in enumerate(choices.best())]
        tokens = sum(len(one.told or ()) for one in told)
        body = await self._desk.written(tokens, partial(self._form.whole, head, told, choices.usage()))
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, head: Head, choices: Choices, heard: list[Heard]
    ) -> web.StreamResponse:
        stream = EventStream(send_timeout_s=self._desk.send_timeout_s)
        await stream.response.prepare(request)
        async with stream.response:
            try:
                await self._write_or_say_why(stream, head, choices, heard)
            except OSError as error:  # the connection is gone, or took nothing for too long
                if isinstance(error, TimeoutError):
                    self._desk.metrics.dropped()
                log.info("client_lost", request=head.id, error=type(error).__name__)
        return stream.response

    async def _write_or_say_why(self, stream: EventStream, head: Head, choices: Choices, heard: list[Heard]) -> None:
        """Write the stream; the status line is out, so what nobody expected can only be told as an event."""
        try:
            await self._write(stream, head, choices, heard)
        except OSError:
            raise
        except Exception:
            log.exception("stream_crashed", request=head.id)
            failed = GenerationFailed("internal error")
            for ongoing in choices.ongoings:
                self._desk.owed.fail(ongoing.answer.wanted.request, failed)
            await stream.send(to_json(envelope(failed)))
            await stream.done()

    async def _write(self, stream: EventStream, head: Head, choices: Choices, heard: list[Heard]) -> None:
        begun: set[int] = set()
        left = len(choices.ongoings)
        while left:
            events: list[bytes] = []
            for one in heard:
                if one.news.error is not None:
                    await stream.send(*events, to_json(envelope(one.news.error)))
                    await stream.done()
                    return
                events += [] if one.place in begun else self._form.first(head, one.place)
                events += await self._events(head, choices, one)
                begun.add(one.place)
                left -= one.news.is_last
            await stream.send(*events)
            heard = await choices.news() if left else []  # bounded, as above
        if head.has_usage:
            await stream.send(self._form.usage(head, choices.usage()))
        await stream.done()

    async def _events(self, head: Head, choices: Choices, one: Heard) -> list[bytes]:
        events = []
        told = one.news.told if head.tells_logprobs else None
        if one.news.text or told or one.news.calls:
            piece = Piece(one.place, one.news.text, told, one.news.calls)
            write = partial(self._form.piece, head, piece, choices.usage())
            events.append(await self._desk.written(len(told or ()), write))
        if one.news.finish is not None:
            events.append(self._form.last(head, one.place, one.news.finish))
        return events


class Gathered:
    """What is known of one answer that is told as a whole."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._told: list[Told] = []
        self._calls: list[ToldCall] = []
        self._finish: FinishReason | None = None

    def add(self, news: News) -> None:
        """Take news of it."""
        self._texts.append(news.text)
        self._told += news.told
        self._calls += news.calls
        self._finish = news.finish

    def whole(self, index: int, head: Head) -> Whole:
        """Return all of it."""
        assert self._finish is not None, "the last news carries an error or a finish"  # noqa: S101 - a bug, not input
        told = self._told if head.tells_logprobs else None
        return Whole(index, "".join(self._texts), self._finish, told, self._calls)
