"""The two routes that generate: read, admit, and write the answer as one object or as a stream."""

import secrets
from functools import partial
from typing import Generic, TypeVar

import structlog
from aiohttp import web

from services.gateway.access import tenant_at
from services.gateway.bodies import ChatBody, CompletionBody, StreamOptions, read_body
from services.gateway.desk import Desk, Newcomer
from services.gateway.errors import envelope
from services.gateway.formats import CachedTokens, Format, Head, Usage, to_json
from services.gateway.ongoing import News, Ongoing
from services.gateway.request_ids import request_id_of
from services.gateway.sse import EventStream
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
        """Answer one request. Whatever happens, its computation ends with it."""
        try:
            with self._desk.door.passing(self._desk.owed.unwritten):
                body, ongoing = await self._take_in(request)
                self._desk.owed.add(ongoing)
        except Exception:
            self._desk.metrics.finished("rejected")
            raise
        try:
            return await self._answer(request, body, ongoing)
        finally:
            self._desk.close(ongoing, request_id_of(request))

    async def _take_in(self, request: web.Request) -> tuple[_Body, Ongoing]:
        started_s = self._desk.clock()
        body = await self._desk.intake.read(request, partial(read_body, self._body))
        own_id = RequestId(f"{self._prefix}-{secrets.token_hex(12)}")
        newcomer = Newcomer(own_id, tenant_at(request), started_s)
        return body, await self._desk.take_in(body, newcomer)

    async def _answer(self, request: web.Request, body: _Body, ongoing: Ongoing) -> web.StreamResponse:
        options = body.stream_options or StreamOptions()
        request_id, created = ongoing.answer.wanted.request, wall_clock_s()
        head = Head(request_id, created, self._desk.model, options.include_usage, options.continuous_usage_stats)
        news = await self._desk.first_news(ongoing)
        if body.stream:
            return await self._stream(request, head, ongoing, news)
        return await self._whole(head, ongoing, news)

    async def _whole(self, head: Head, ongoing: Ongoing, news: News | None) -> web.Response:
        texts = [] if news is None else [news.text]
        while news is None or not news.is_last:
            news = await ongoing.news()  # bounded: the watch ends every answer when the scheduler falls silent
            texts.append(news.text)
        if news.error is not None:
            raise news.error
        assert news.finish is not None, "the last news carries an error or a finish"  # noqa: S101 - a bug, not input
        body = self._form.whole(head, "".join(texts), news.finish, _usage(ongoing, news))
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, head: Head, ongoing: Ongoing, news: News | None
    ) -> web.StreamResponse:
        stream = EventStream(send_timeout_s=self._desk.send_timeout_s)
        await stream.response.prepare(request)
        async with stream.response:
            try:
                await self._write_or_say_why(stream, head, ongoing, news)
            except OSError as error:  # the connection is gone, or took nothing for too long
                if isinstance(error, TimeoutError):
                    self._desk.metrics.dropped()
                log.info("client_lost", request=head.id, error=type(error).__name__)
        return stream.response

    async def _write_or_say_why(self, stream: EventStream, head: Head, ongoing: Ongoing, news: News | None) -> None:
        """Write the stream; the status line is out, so what nobody expected can only be told as an event."""
        try:
            await self._write(stream, head, ongoing, news)
        except OSError:
            raise
        except Exception:
            log.exception("stream_crashed", request=head.id)
            failed = GenerationFailed("internal error")
            self._desk.owed.fail(RequestId(head.id), failed)
            await stream.send(to_json(envelope(failed)))
            await stream.done()

    async def _write(self, stream: EventStream, head: Head, ongoing: Ongoing, news: News | None) -> None:
        has_begun = False
        while True:
            if news is None:
                news = await ongoing.news()  # bounded, as above
            await stream.send(*self._events(head, ongoing, news, has_begun=has_begun))
            if news.is_last:
                break
            has_begun, news = True, None
        await stream.done()

    def _events(self, head: Head, ongoing: Ongoing, news: News, *, has_begun: bool) -> list[bytes]:
        events = [] if has_begun or news.error else self._form.first(head)
        if news.text:
            events.append(self._form.piece(head, news.text, _usage(ongoing, news)))
        if news.error is not None:
            events.append(to_json(envelope(news.error)))
        elif news.finish is not None:
            events.append(self._form.last(head, news.finish))
            if head.has_usage:
                events.append(self._form.usage(head, _usage(ongoing, news)))
        return events


def _usage(ongoing: Ongoing, news: News) -> Usage:
    prompt_tokens = len(ongoing.answer.wanted.prompt_ids)
    cached = CachedTokens(ongoing.answer.cached_tokens)
    return Usage(prompt_tokens, news.completion_tokens, prompt_tokens + news.completion_tokens, cached)
