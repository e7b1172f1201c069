"""How tokens are to be drawn: as the request says, else as the model's own generation config says. Pure."""

import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from services.gateway.asked import answers_each, told_logprobs
from services.gateway.asked_tools import tool_use_of
from services.gateway.bodies import ChatBody, CompletionBody, GenerationBody
from services.gateway.grammars import PARAM, grammar_of
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import InvalidParameter
from shared.protocol.messages import Bias, Sampling

MAX_BIASES = 1024
MAX_STOP_TOKENS = 128
_ID_DIGITS = 10


def sampling_of(body: ChatBody | CompletionBody, tokenizer: ModelTokenizer, drawn_seed: int) -> Sampling:
    """Return how tokens are drawn. Raises InvalidParameter: tokens that the vocabulary does not have, bad grammars."""
    defaults, tools = tokenizer.defaults, tool_use_of(body, tokenizer)
    return Sampling(
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
        seed=drawn_seed if body.seed is None else body.seed,
        min_p=_given(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        min_tokens=body.min_tokens,
        biases=_biases(body, tokenizer.vocabulary),
        stop_token_ids=_stop_token_ids(body, tokenizer.vocabulary),
        logprobs=_needed_logprobs(body),
        grammar=_grammar(body, None if tools is None else tools.grammar(tokenizer.marker_ids)),
        prompt_logprobs=told_logprobs(body) if isinstance(body, CompletionBody) and body.echo else None,
    )


def _grammar(body: GenerationBody, of_tools: str | None) -> str:
    """Return what the text of the answer follows. Raises InvalidParameter if two things want to decide that."""
    wanted = grammar_of(body)
    if wanted and of_tools is not None:
        raise InvalidParameter(f"{PARAM}: not together with tools that may be called", param=PARAM)
    return wanted or of_tools or ""


def sampling_of_choice(sampling: Sampling, choice: int) -> Sampling:
    """Return the same with a seed of its own; that of the first choice is the seed itself.

    Only that one asks about the prompt: what it hears holds for the others, who may find the prompt cached.
    """
    if not choice:
        return sampling
    data = f"{sampling.seed}/{choice}".encode()
    drawn = int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"choice").digest(), "little", signed=True)
    return replace(sampling, seed=drawn, prompt_logprobs=None)


def _needed_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """Return what workers must tell: what the client is told, or what the best are chosen by."""
    told = told_logprobs(body)
    return 0 if told is None and answers_each(body) > body.n else told


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _biases(body: GenerationBody, vocabulary: int) -> tuple[Bias, ...]:
    biases = body.logit_bias or {}
    if len(biases) > MAX_BIASES:
        raise InvalidParameter(f"logit_bias: at most {MAX_BIASES} tokens", param="logit_bias")
    return tuple(Bias(_id_of(key, vocabulary), bias) for key, bias in biases.items() if bias)


def _id_of(key: str, vocabulary: int) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS) or int(key) >= vocabulary:
        raise InvalidParameter(
            f"logit_bias: {key[:64]!r} is not the id of one of the {vocabulary} tokens", param="logit_bias"
        )
    return int(key)


def _stop_token_ids(body: GenerationBody, vocabulary: int) -> tuple[int, ...]:
    ids: Sequence[int] = body.stop_token_ids or ()
    if len(ids) > MAX_STOP_TOKENS:
        raise InvalidParameter(f"stop_token_ids: at most {MAX_STOP_TOKENS} tokens", param="stop_token_ids")
    for token_id in ids:
        if not 0 <= token_id < vocabulary:
            raise InvalidParameter(
                f"stop_token_ids: {token_id} is not the id of one of the {vocabulary} tokens", param="stop_token_ids"
            )
    return tuple(dict.fromkeys(ids))
