"""A body, checked and made ready for a worker. Pure: the draw of a seed is passed in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.asked_tools import chat_of, check_chat
from services.gateway.bodies import INT64_MAX, INT64_MIN, MAX_CHOICES, ChatBody, CompletionBody, GenerationBody
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import InvalidParameter, PromptTooLong

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
COMPLETION_MAX_TOKENS = 16
"""What a completion gets that does not say how much it wants; a chat gets all there is room for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an answer may get: ``asked`` by the client, else ``default``; with the prompt at most ``served``.

    At least one token is generated, whether anybody asked for it or not.
    """

    asked: int | None
    default: int | None
    served: int
    param: str

    def max_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens that the answer may have. Raises PromptTooLong with both numbers."""
        room = self.served - prompt_tokens
        wanted = max(1, self.asked or 0)
        if wanted > room:
            raise PromptTooLong(
                f"this model's maximum context length is {self.served} tokens, but you requested "
                f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} for the answer)",
                param=self.param,
            )
        return wanted if self.asked is not None else min(room, self.default or room)


def check_least(body: GenerationBody, max_tokens: int) -> None:
    """Raise InvalidParameter if the answer could never be as long as it has to be."""
    max_tokens = 0 if is_prompt_only(body) else max_tokens
    if body.min_tokens > max_tokens:
        raise InvalidParameter(
            f"min_tokens: {body.min_tokens} is more than the {max_tokens} tokens that the answer may have",
            param="min_tokens",
        )


def check(body: GenerationBody) -> None:
    """Raise InvalidParameter for what the types alone do not say."""
    if body.seed is not None and not INT64_MIN <= body.seed <= INT64_MAX:
        raise InvalidParameter("seed: it must fit into 64 bits", param="seed")
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options: only allowed when stream is true", param="stream_options")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs: only allowed when logprobs is true", param="top_logprobs")
    if isinstance(body, ChatBody):
        check_chat(body)
    if isinstance(body, CompletionBody) and body.best_of is not None:
        _check_best_of(body, body.best_of)
    if is_prompt_only(body) and not (isinstance(body, CompletionBody) and body.echo):
        raise InvalidParameter("max_tokens: 0 is only allowed when echo is true", param="max_tokens")
    stops_of(body)


def _check_best_of(body: CompletionBody, best_of: int) -> None:
    if best_of < body.n:
        raise InvalidParameter(f"best_of: it must be at least n, which is {body.n}", param="best_of")
    if body.stream and best_of > body.n:
        raise InvalidParameter("best_of: more than n only when stream is false", param="best_of")


def is_prompt_only(body: GenerationBody) -> bool:
    """Return whether the answer is to be the prompt and nothing more."""
    return body.max_tokens == 0


def answers_each(body: ChatBody | CompletionBody) -> int:
    """Return how many answers are computed for each prompt, of which n are told."""
    return body.n if isinstance(body, ChatBody) or body.best_of is None else body.best_of


def told_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """Return how many of the likeliest tokens are told at each place; None if no logprobs are."""
    if isinstance(body, ChatBody):
        return body.top_logprobs if body.logprobs else None
    return body.logprobs


def stops_of(body: GenerationBody) -> tuple[str, ...]:
    """Return the stop strings. Raises InvalidParameter: too many, empty, too long."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidParameter(f"stop: at most {MAX_STOPS} strings", param="stop")
    if not all(stops):
        raise InvalidParameter("stop: a stop string cannot be empty", param="stop")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise InvalidParameter(f"stop: at most {MAX_STOP_CHARACTERS} characters each", param="stop")
    return stops


def limits_of(body: ChatBody | CompletionBody, length_served: int) -> Limits:
    """Return how long the answer may get."""
    if isinstance(body, CompletionBody):
        return Limits(body.max_tokens, COMPLETION_MAX_TOKENS, length_served, "prompt")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Limits(asked, None, length_served, "messages")


Prompts = tuple[tuple[int, ...], ...]


def prompt_ids_of(body: ChatBody | CompletionBody, tokenizer: ModelTokenizer, served: int) -> Prompts:
    """Return the tokens of each prompt.

    Raises InvalidParameter: empty, of the wrong type, not in the vocabulary, too many. Raises PromptTooLong for a text
    that is certainly longer than ``served`` tokens, before it is tokenised.
    """
    if isinstance(body, ChatBody):
        text = tokenizer.render(chat_of(body.messages, body.tools, body.chat_template_kwargs))
        _check_length(text, tokenizer, served, "messages")
        return (_not_empty(tokenizer.encode(text, is_chat=True), "messages"),)
    prompts = prompts_in(body.prompt)
    if len(prompts) * answers_each(body) > MAX_CHOICES:
        raise InvalidParameter(f"prompt: at most {MAX_CHOICES} answers per request are served", param="prompt")
    return tuple(_completion_ids(prompt, tokenizer, served) for prompt in prompts)


def prompts_in(prompt: str | list[Any]) -> list[str | list[Any]]:
    """Return a prompt, or several, as a list; what else there may be in it is found when it is read."""
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        return prompt
    return [prompt]


def _completion_ids(prompt: str | list[Any], tokenizer: ModelTokenizer, served: int) -> tuple[int, ...]:
    if isinstance(prompt, list):
        return _checked_ids(prompt, tokenizer.vocabulary)
    _check_length(prompt, tokenizer, served, "prompt")
    return _not_empty(tokenizer.encode(prompt, is_chat=False), "prompt")


def _check_length(text: str, tokenizer: ModelTokenizer, served: int, param: str) -> None:
    least = tokenizer.least_tokens(text)
    if least > served:
        raise PromptTooLong(
            f"this model's maximum context length is {served} tokens, but you requested at least {least} tokens",
            param=param,
        )


def _not_empty(token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
    if not token_ids:
        raise InvalidParameter(f"{param}: the prompt is empty", param=param)
    return token_ids


def _checked_ids(prompt: Sequence[Any], vocabulary: int) -> tuple[int, ...]:
    for token_id in prompt:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidParameter("prompt: expected a string, token ids, or a list of either", param="prompt")
        if not 0 <= token_id < vocabulary:
            raise InvalidParameter(
                f"prompt: token id {token_id} is not in the vocabulary of {vocabulary} tokens", param="prompt"
            )
    return _not_empty(tuple(prompt), "prompt")
