"""A prompt as the answers to it repeat it: its text, and its tokens with their logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.asked import Prompts, is_prompt_only, prompts_in, told_logprobs
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.token_texts import TokenTexts
from services.gateway.tokenizer import ModelTokenizer
from services.gateway.told import Told, told_of
from shared.errors import InvalidParameter
from shared.protocol.messages import Logprobs

MAX_TOLD = 65_536
"""Tokens of prompts that one request is told the logprobs of, in all its choices: 15 MB of JSON, written in 0.12 s.

In a thread: see `Desk.written`.
"""


@dataclass(frozen=True, slots=True)
class EchoText:
    """The text of a prompt; ``offsets`` are where its tokens begin in it, if anything is told of them."""

    text: str
    offsets: tuple[int, ...] = ()


def echo_texts(body: CompletionBody, prompts: Prompts, tokenizer: ModelTokenizer) -> tuple[EchoText, ...]:
    """Return what answers repeat of each prompt. Takes about as long as tokenising.

    Raises InvalidParameter for more tokens with logprobs than are told.
    """
    texts = [
        given if isinstance(given, str) else tokenizer.decode(token_ids, with_special=True)
        for given, token_ids in zip(prompts_in(body.prompt), prompts, strict=True)
    ]
    if told_logprobs(body) is None:
        return tuple(map(EchoText, texts))
    if body.n * sum(map(len, prompts)) > MAX_TOLD:
        raise InvalidParameter(f"echo: with logprobs at most {MAX_TOLD} tokens in all choices together", param="echo")
    pairs = zip(texts, prompts, strict=True)
    return tuple(EchoText(text, _offsets(text, token_ids, tokenizer)) for text, token_ids in pairs)


def _offsets(text: str, token_ids: Sequence[int], tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Return where tokens begin in the text that they come from.

    Never beyond its end, nor before the one before: a tokenizer that changes text may give back more than it was given.
    """
    detokenizer = tokenizer.detokenizer(with_special=True)
    offsets, at = [], 0
    for token_id in token_ids:
        offsets.append(at)
        if token_id in tokenizer.special_ids and not text.startswith(tokenizer.texts.of(token_id).text, at):
            continue  # put there by the tokenizer
        at = min(at + len(detokenizer.push(token_id)), len(text))
    return tuple(offsets)


class Echo:
    """One prompt's echo, shared by all answers to it. Only the first of them asks how likely its tokens were."""

    def __init__(self, echo: EchoText, prompt_ids: Sequence[int], texts: TokenTexts, *, is_all: bool) -> None:
        self.text = echo.text
        self.is_all = is_all
        """Whether nothing follows it."""
        self.told: list[Told] = []
        self._offsets = echo.offsets
        self._prompt_ids = prompt_ids
        self._texts = texts
        if echo.offsets:
            self.told.append(Told(texts.of(prompt_ids[0]), None, (), 0))

    @property
    def is_whole(self) -> bool:
        """Whether all is known that is told of it."""
        return len(self.told) == len(self._offsets)

    def hear(self, logprobs: Sequence[Logprobs]) -> None:
        """Take what is told of the next tokens."""
        for one in logprobs:
            place = len(self.told)
            self.told.append(told_of(self._texts, self._prompt_ids[place], one, self._offsets[place]))


def echoes_of(body: ChatBody | CompletionBody, prompts: Prompts, tokenizer: ModelTokenizer) -> Sequence[Echo | None]:
    """Return the echo of each prompt, if there is to be one. Raises as `echo_texts` does, and takes time."""
    if not isinstance(body, CompletionBody) or not body.echo:
        return [None] * len(prompts)
    texts, is_all = echo_texts(body, prompts, tokenizer), is_prompt_only(body)
    return [Echo(text, ids, tokenizer.texts, is_all=is_all) for text, ids in zip(texts, prompts, strict=True)]
