"""What one streamed answer says, event by event, and whether it kept the API's promises."""

from typing import Any, Literal, NamedTuple

import msgspec

DONE = b"[DONE]"

FailureKind = Literal[
    "http",  # a status other than 200
    "not_a_stream",  # 200, but no event stream
    "error_event",  # an error in the midst of the stream
    "bad_event",  # an event that is not the JSON it should be
    "no_done",  # the stream ended without [DONE]
    "no_finish_reason",
    "no_usage",  # asked for and not sent: the tokens cannot be counted
    "usage_mismatch",  # the last count of tokens is not the largest
    "timeout",
    "connection",
]


class Failure(NamedTuple):
    """Why a request counts as failed. `name` tells HTTP statuses apart."""

    kind: FailureKind
    message: str
    status: int | None = None
    retry_after: str | None = None

    @property
    def name(self) -> str:
        """What failures are counted by."""
        return f"http_{self.status}" if self.kind == "http" else self.kind


class Usage(msgspec.Struct, frozen=True):
    """The server's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(NamedTuple):
    """An event of the stream: when it came, tokens of the answer so far (None: not said), whether it had text."""

    at_s: float
    tokens_so_far: int | None
    has_text: bool


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class Answer:
    """One answer as it comes in. Times are whatever the caller's clock says, in seconds."""

    def __init__(self) -> None:
        self.first_event_s: float | None = None
        self.first_text_s: float | None = None
        self.done_s: float | None = None
        self.chunks: list[Chunk] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._failure: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing that may follow would count any more."""
        return self.done_s is not None or self._failure is not None

    def take(self, data: bytes, at_s: float) -> None:
        """Take the data of one event that came at `at_s`; what follows the end is ignored."""
        if self.is_over:
            return
        if self.first_event_s is None:
            self.first_event_s = at_s
        if data.startswith(DONE):
            self.done_s = at_s
            return
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._failure = Failure("bad_event", f"{error}: {data[:200]!r}")
            return
        self._apply(event, at_s)

    def _apply(self, event: _Event, at_s: float) -> None:
        if event.error:
            self._failure = Failure("error_event", error_message(event.error))
            return
        choices = event.choices or []
        has_text = any(_has_text(choice) for choice in choices)
        if has_text and self.first_text_s is None:
            self.first_text_s = at_s
        for choice in choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
        # the event that has only the sum carries no token: its count may come much later than the last token did
        if choices:
            self.chunks.append(Chunk(at_s, event.usage.completion_tokens if event.usage else None, has_text))
        self.usage = event.usage or self.usage

    def verdict(self) -> Failure | None:
        """Return the promise that this answer broke first, None if it is whole."""
        if self._failure is not None:
            return self._failure
        if self.done_s is None:
            return Failure("no_done", "the stream ended without [DONE]")
        if self.finish_reason is None:
            return Failure("no_finish_reason", "no choice ever had a finish_reason")
        if self.usage is None:
            return Failure("no_usage", "stream_options.include_usage was asked for, no usage came")
        largest = max((chunk.tokens_so_far or 0 for chunk in self.chunks), default=0)
        if largest > self.usage.completion_tokens:
            return Failure("usage_mismatch", f"{largest} tokens counted, {self.usage.completion_tokens} in the end")
        return None


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


def error_message(error: object) -> str:
    """Return the sentence in an error object of the OpenAI kind, or the whole of another kind, cut to a line."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:500]
