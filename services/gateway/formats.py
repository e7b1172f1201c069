"""What is sent to clients: OpenAI's objects for chats and completions, whole or in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.logprob_formats import ChatLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from services.gateway.told import Told
from services.gateway.tool_reading import ToldCall

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(Struct, frozen=True):
    """How many tokens of the prompt did not have to be computed."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """What a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class _Function(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class _CallPiece(Struct, frozen=True):
    index: int
    function: _Function
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class _Call(Struct, frozen=True):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _Message(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: tuple[_Call, ...] | UnsetType = UNSET


class _ChatChoice(Struct, frozen=True):
    message: _Message
    finish_reason: FinishReason
    index: int
    logprobs: ChatLogprobs | None = None


class _Delta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: tuple[_CallPiece, ...] | UnsetType = UNSET


class _ChunkChoice(Struct, frozen=True):
    delta: _Delta
    index: int
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class _TextChoice(Struct, frozen=True):
    text: str
    index: int
    finish_reason: FinishReason | None = None
    logprobs: TextLogprobs | None = None


class _Answer(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_ChatChoice | _ChunkChoice | _TextChoice, ...] | tuple[()]
    usage: Usage | UnsetType | None = UNSET


class Head(Struct, frozen=True):
    """What every chunk of one answer repeats. ``has_usage``: the client asked for a usage chunk at the end.

    ``counts``: it also asked that every chunk with text says how many tokens there are so far. ``tells_logprobs``: that
    chunks with text say how likely its tokens were.
    """

    id: str
    created: int
    model: str
    has_usage: bool
    counts: bool = False
    tells_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one choice's text, or of its calls. ``told`` is None if no logprobs were asked for."""

    index: int
    text: str
    told: Sequence[Told] | None = None
    calls: Sequence[ToldCall] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """All of one choice."""

    index: int
    text: str
    finish: FinishReason
    told: Sequence[Told] | None = None
    calls: Sequence[ToldCall] = ()


class Format(Protocol):
    """How one endpoint writes answers. Every method returns JSON."""

    def first(self, head: Head, index: int) -> list[bytes]:
        """Return what goes out with a choice's first token, before its text."""

    def piece(self, head: Head, piece: Piece, so_far: Usage) -> bytes:
        """Return a chunk of text."""

    def last(self, head: Head, index: int, finish: FinishReason) -> bytes:
        """Return the chunk that says why a choice ends."""

    def usage(self, head: Head, usage: Usage) -> bytes:
        """Return the chunk after the last: no choices, only the usage."""

    def whole(self, head: Head, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Return the answer in one piece."""


class ChatFormat:
    """/v1/chat/completions."""

    def first(self, head: Head, index: int) -> list[bytes]:
        """Return the chunk that names the role."""
        return [self._chunk(head, _ChunkChoice(_Delta(role="assistant", content=""), index))]

    def piece(self, head: Head, piece: Piece, so_far: Usage) -> bytes:
        """Return a chunk of text."""
        logprobs = None if piece.told is None else chat_logprobs(piece.told)
        return self._chunk(head, _ChunkChoice(_delta(piece), piece.index, logprobs=logprobs), so_far)

    def last(self, head: Head, index: int, finish: FinishReason) -> bytes:
        """Return an empty delta with the reason."""
        return self._chunk(head, _ChunkChoice(_Delta(), index, finish))

    def usage(self, head: Head, usage: Usage) -> bytes:
        """Return the chunk after the last."""
        return _json(_Answer(head.id, "chat.completion.chunk", head.created, head.model, (), usage))

    def whole(self, head: Head, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Return the answer in one piece."""
        made = tuple(
            _ChatChoice(_message(one), one.finish, one.index, None if one.told is None else chat_logprobs(one.told))
            for one in choices
        )
        return _json(_Answer(head.id, "chat.completion", head.created, head.model, made, usage))

    def _chunk(self, head: Head, choice: _ChunkChoice, so_far: Usage | None = None) -> bytes:
        usage = _usage_of_chunk(head, so_far)
        return _json(_Answer(head.id, "chat.completion.chunk", head.created, head.model, (choice,), usage))


def _delta(piece: Piece) -> _Delta:
    if not piece.calls:
        return _Delta(content=piece.text)
    calls = tuple(
        _CallPiece(call.index, _Function(call.arguments))
        if call.id is None or call.name is None
        else _CallPiece(call.index, _Function(call.arguments, call.name), call.id, "function")
        for call in piece.calls
    )
    return _Delta(content=piece.text or UNSET, tool_calls=calls)


def _message(whole: Whole) -> _Message:
    if not whole.calls:
        return _Message(whole.text)
    arguments: dict[int, str] = {}
    for call in whole.calls:
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    calls = tuple(
        _Call(call.id, _Function(arguments[call.index], call.name))
        for call in whole.calls
        if call.id is not None and call.name is not None
    )
    return _Message(whole.text or None, tool_calls=calls)


class CompletionFormat:
    """/v1/completions: the same object, whole or in chunks."""

    def first(self, head: Head, index: int) -> list[bytes]:  # noqa: ARG002 - the port's signature; no role is named here
        """Return nothing."""
        return []

    def piece(self, head: Head, piece: Piece, so_far: Usage) -> bytes:
        """Return a chunk of text."""
        logprobs = None if piece.told is None else text_logprobs(piece.told)
        return self._chunk(head, _TextChoice(piece.text, piece.index, logprobs=logprobs), so_far)

    def last(self, head: Head, index: int, finish: FinishReason) -> bytes:
        """Return an empty text with the reason."""
        return self._chunk(head, _TextChoice("", index, finish))

    def usage(self, head: Head, usage: Usage) -> bytes:
        """Return the chunk after the last."""
        return _json(_Answer(head.id, "text_completion", head.created, head.model, (), usage))

    def whole(self, head: Head, choices: Sequence[Whole], usage: Usage) -> bytes:
        """Return the answer in one piece."""
        made = tuple(
            _TextChoice(one.text, one.index, one.finish, None if one.told is None else text_logprobs(one.told))
            for one in choices
        )
        return _json(_Answer(head.id, "text_completion", head.created, head.model, made, usage))

    def _chunk(self, head: Head, choice: _TextChoice, so_far: Usage | None = None) -> bytes:
        usage = _usage_of_chunk(head, so_far)
        return _json(_Answer(head.id, "text_completion", head.created, head.model, (choice,), usage))


def _usage_of_chunk(head: Head, so_far: Usage | None) -> Usage | UnsetType | None:
    if not head.has_usage:
        return UNSET
    return so_far if head.counts else None


class Model(Struct, frozen=True):
    """A model as /v1/models lists it."""

    id: str
    created: int
    root: str
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "slipstream"


class ModelList(Struct, frozen=True):
    """The answer of /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class Ready(Struct, frozen=True):
    """The answer of /ready."""

    ready: bool
    reason: str | None = None


class ErrorBody(Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Struct, frozen=True):
    """How every error is sent, as an HTTP answer or as an event of a stream."""

    error: ErrorBody


_encoder = msgspec.json.Encoder()


def _json(value: Struct) -> bytes:
    return _encoder.encode(value)


def to_json(value: Struct) -> bytes:
    """Return the JSON of one of these objects."""
    return _json(value)
