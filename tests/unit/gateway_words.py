"""Bodies as clients send them, and a tokenizer to read them with."""

from typing import Any

import msgspec

from services.gateway.asked import (
    check,
)
from services.gateway.bodies import ChatBody, CompletionBody, read_body
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import fake_tokenizer_files

MESSAGES = [{"role": "user", "content": "hi"}]
TOKENIZER = ModelTokenizer(fake_tokenizer_files())
SERVED = 1000


def chat(**fields: Any) -> ChatBody:
    body = read_body(ChatBody, msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields}))
    check(body)
    return body


def completion(**fields: Any) -> CompletionBody:
    body = read_body(CompletionBody, msgspec.json.encode({"model": "m", "prompt": "hi", **fields}))
    check(body)
    return body
