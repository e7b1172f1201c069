"""`response_format`: which grammar it comes to, and what is refused."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.gateway.asked_sampling import sampling_of
from services.gateway.bodies import ChatBody, CompletionBody, read_body
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import EOS_ID, fake_tokenizer_files
from shared.errors import InvalidParameter

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["name", "people"],
    "additionalProperties": False,
}


def body_with(response_format: Any, **fields: Any) -> ChatBody:
    messages = [{"role": "user", "content": "x"}]
    asked = {"model": "m", "messages": messages, "response_format": response_format, **fields}
    return read_body(ChatBody, json.dumps(asked).encode())


def schema(given: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": given, **more}}


def grammar_of(body: ChatBody | CompletionBody) -> str:
    return sampling_of(body, ModelTokenizer(fake_tokenizer_files()), 1).grammar


def takes(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer(fake_tokenizer_files().tokenizer_json.decode(), eos_token=[EOS_ID])
    matcher = LLMatcher(tokenizer, grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("nothing", [None, {"type": "text"}])
def test_what_asks_for_nothing_leaves_the_answer_free(nothing: Any) -> None:
    assert grammar_of(body_with(nothing)) == ""


def test_any_object_is_an_object() -> None:
    for grammar in (grammar_of(body_with({"type": "json_object"})), grammar_of(body_with(schema(None)))):
        assert takes(grammar, '{"a": [1, {"b": null}]}')
        assert not takes(grammar, "[1]")
        assert not takes(grammar, '{"a": 1')


@pytest.mark.parametrize("more", [{}, {"strict": True}, {"strict": False, "description": "A city."}, {"strict": None}])
def test_a_schema_is_followed_with_at_most_one_blank_between_its_parts(more: dict[str, Any]) -> None:
    grammar = grammar_of(body_with(schema(CITY, **more)))
    assert takes(grammar, '{"name": "Köln", "people": 1}')
    assert takes(grammar, '{"name":"Köln","people":1}')
    for wrong in ('{"name": "Köln"}', '{"name": 1, "people": 1}', '{"name":  "Köln", "people": 1}', "{}", '{"x": 1}'):
        assert not takes(grammar, wrong), wrong


def test_a_schema_cannot_say_how_it_is_compiled() -> None:
    loose = {**CITY, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert grammar_of(body_with(schema(loose))) == grammar_of(body_with(schema(CITY)))


def test_completions_have_it_too() -> None:
    asked = {"model": "m", "prompt": "x", "response_format": schema(CITY)}
    assert grammar_of(read_body(CompletionBody, json.dumps(asked).encode())) == grammar_of(body_with(schema(CITY)))


def deep(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        inner = {"type": "array", "items": inner}
    return inner


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"type": "nope"}, "response_format.type: Invalid value 'nope'"),
        ({}, "type"),
        ("json_object", "response_format"),
        ({"type": "json_schema"}, "json_schema"),
        (schema("x"), "response_format.json_schema.schema: Expected `object"),
        (schema({"type": "nope"}), "response_format.json_schema.schema: Invalid type: nope"),
        (
            schema({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}),
            "response_format.json_schema.schema: ",
        ),
        (schema({"type": "string", "pattern": "("}), "response_format.json_schema.schema: "),
        (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "response_format.json_schema.schema: "),
        (schema(deep(40)), "at most 32 levels deep"),
        (schema({"enum": ["x" * 300_000]}), "262144 characters"),
        (schema(CITY, extra=1), "extra"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused_by_name(wanted: Any, says: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        grammar_of(body_with(wanted))
    assert says in str(refused.value)
    assert (refused.value.param or "").startswith("response_format")


def test_an_answer_that_follows_a_grammar_ends_with_it() -> None:
    with pytest.raises(InvalidParameter) as refused:
        grammar_of(body_with({"type": "json_object"}, ignore_eos=True))
    assert refused.value.param == "ignore_eos"
