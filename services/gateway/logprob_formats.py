"""Logprobs as OpenAI's two endpoints write them."""

from collections.abc import Sequence

from msgspec import Struct

from services.gateway.told import Told


class _ChatRanked(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class _ChatToken(Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: tuple[_ChatRanked, ...]


class ChatLogprobs(Struct, frozen=True):
    """One entry for each token."""

    content: tuple[_ChatToken, ...]
    refusal: None = None


class TextLogprobs(Struct, frozen=True):
    """Lists of the same length, one entry of each for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(told: Sequence[Told]) -> ChatLogprobs:
    """Return the logprobs of a chat's tokens."""
    return ChatLogprobs(
        tuple(
            _ChatToken(
                one.token.text,
                one.logprob,
                list(one.token.data),
                tuple(_ChatRanked(other.token.text, other.logprob, list(other.token.data)) for other in one.top),
            )
            for one in told
        )
    )


def text_logprobs(told: Sequence[Told]) -> TextLogprobs:
    """Return the logprobs of a completion's tokens; the token itself is always among the likeliest it names."""
    return TextLogprobs(
        text_offset=[one.offset for one in told],
        token_logprobs=[one.logprob for one in told],
        tokens=[one.token.text for one in told],
        top_logprobs=[None if one.logprob is None else _with_itself(one, one.logprob) for one in told],
    )


def _with_itself(told: Told, logprob: float) -> dict[str, float]:
    ranked: dict[str, float] = {}
    for one in told.top:
        ranked.setdefault(one.token.text, one.logprob)  # several may read alike: the likeliest of them counts
    ranked.setdefault(told.token.text, logprob)
    return ranked
