"""The routes that turn text into tokens and back, as vLLM has them. Nothing is generated; no worker hears of it."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from msgspec import Meta, Struct

from services.gateway.asked_tools import chat_of, check_template_kwargs, check_tools
from services.gateway.bodies import INT32_MAX, ChatMessage, read_body
from services.gateway.desk import Desk
from services.gateway.facts import json_response, unknown_model
from services.gateway.formats import to_json
from services.gateway.tokenizer import ModelTokenizer
from services.gateway.tool_bodies import MAX_TOOLS, Tool
from shared.errors import InvalidParameter
from shared.runtime.threads import Threads

MAX_CHARACTERS = 1_000_000
"""A text may be longer than the model's context, but an answer of its tokens has to be written in one piece."""

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: a text, or a chat as the model's template writes it."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    """For a text; a chat has its special tokens from its template."""
    add_generation_prompt: Literal[True] = True
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class TokenizeAnswer(Struct, frozen=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeAnswer(Struct, frozen=True):
    """The answer of /detokenize: the text, special tokens included."""

    prompt: str


_Body = TypeVar("_Body", TokenizeBody, DetokenizeBody)


class TokenRoutes:
    """/tokenize and /detokenize. One text at a time, by a door of its own: generating requests keep their places."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._thread = Threads(1, "token-routes")

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer with the tokens of a text or of a chat."""
        return await self._answer(request, TokenizeBody, self._tokenized)

    async def detokenize(self, request: web.Request) -> web.Response:
        """Answer with the text of tokens."""
        return await self._answer(request, DetokenizeBody, _detokenized)

    async def _answer(
        self, request: web.Request, kind: type[_Body], work: Callable[[_Body, ModelTokenizer], bytes]
    ) -> web.Response:
        async with self._desk.intake.received(request) as data:
            with self._desk.texts.passing():
                body = await self._desk.intake.decoded(data, partial(read_body, kind))
                do = partial(work, body, self._tokenizer_for(body.model))
                return json_response(await asyncio.get_running_loop().run_in_executor(self._thread, do))

    def _tokenized(self, body: TokenizeBody, tokenizer: ModelTokenizer) -> bytes:
        return _tokenized(body, tokenizer, self._desk.pool.length_served)

    def _tokenizer_for(self, model: str | None) -> ModelTokenizer:
        if model is not None and model != self._desk.model:
            raise unknown_model(model)
        return self._desk.pool.serving(self._desk.clock())


def _tokenized(body: TokenizeBody, tokenizer: ModelTokenizer, max_model_len: int) -> bytes:
    tokens = _tokens_of(body, tokenizer)
    strings = tokenizer.names_of(tokens) if body.return_token_strs else None
    return to_json(TokenizeAnswer(len(tokens), max_model_len, tokens, strings))


def _tokens_of(body: TokenizeBody, tokenizer: ModelTokenizer) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameter("prompt: either a prompt or messages are needed", param="prompt")
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, is_chat=not body.add_special_tokens)
    check_tools(body.tools)
    check_template_kwargs(body.chat_template_kwargs)
    text = tokenizer.render(chat_of(body.messages or (), body.tools, body.chat_template_kwargs))
    if len(text) > MAX_CHARACTERS:
        raise InvalidParameter(f"messages: at most {MAX_CHARACTERS} characters in all", param="messages")
    return tokenizer.encode(text, is_chat=True)


def _detokenized(body: DetokenizeBody, tokenizer: ModelTokenizer) -> bytes:
    for token in body.tokens:
        if token >= tokenizer.vocabulary:
            raise InvalidParameter(
                f"tokens: {token} is not in the vocabulary of {tokenizer.vocabulary} tokens", param="tokens"
            )
    return to_json(DetokenizeAnswer(tokenizer.decode(body.tokens, with_special=True)))
