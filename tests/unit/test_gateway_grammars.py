"""What `response_format` comes to: a grammar that workers follow, or a refusal that says why. Nothing costs much."""

import json
import time
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.gateway.bodies import ChatBody, CompletionBody, read_body
from services.gateway.grammars import MAX_MULTIPLE, check_grammar, grammar_of
from services.worker.fake_tokenizer import EOS_ID, VOCABULARY, fake_tokenizer_files
from shared.errors import InvalidParameter
from shared.protocol.grammars import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES
from tests.schemas import PERSON, SCHEMAS

BYTES = LLTokenizer(fake_tokenizer_files().tokenizer_json.decode(), n_vocab=VOCABULARY, eos_token=[EOS_ID])


def of(response_format: Any) -> str:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": response_format}
    plain = {"model": "m", "prompt": "x", "response_format": response_format}
    grammar = grammar_of(read_body(ChatBody, msgspec.json.encode(asked)))
    assert grammar == grammar_of(read_body(CompletionBody, msgspec.json.encode(plain)))
    return grammar


def of_schema(schema: Any, **fields: Any) -> str:
    return of({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}})


def takes(grammar: str, text: str) -> bool:
    """Return whether a grammar takes a text as a whole."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("nothing", [None, {"type": "text"}, {"type": "text", "json_schema": None}])
def test_text_asks_for_nothing(nothing: Any) -> None:
    assert of(nothing) == ""


def test_a_json_object_is_any_object_and_nothing_else() -> None:
    grammar = of({"type": "json_object"})
    for text in ('{"a": [1, {"b": null}], "c": "d"}', "{}", '{\n  "a": 1\n}'):
        assert takes(grammar, text), text
    for text in ("[1]", '"a"', "{", '{"a": 1} and so on', "5"):
        assert not takes(grammar, text), text


def test_a_schema_is_kept_to_strict_or_not() -> None:
    for fields in ({}, {"strict": True}, {"strict": False}, {"strict": None}, {"description": "who", "strict": True}):
        grammar = of_schema(PERSON, **fields)
        assert takes(grammar, '{"name": "Ann", "age": 5}')
        for text in ('{"name": "Ann"}', '{"name": "Ann", "age": 200}', '{"name": "Ann", "age": 5, "x": 1}'):
            assert not takes(grammar, text), text


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_what_is_written_with_or_without_indentation_is_taken_and_blanks_have_an_end(indent: int | None) -> None:
    grammar = of_schema(SCHEMAS["nested"])
    value = {"people": [{"name": "Ann", "age": 5, "email": None}], "done": True}
    assert takes(grammar, json.dumps(value, indent=indent))
    assert takes(grammar, json.dumps(value, separators=(",", ":")))
    for blanks in ("  ", "\n\n", "\n" + 21 * " "):
        assert not takes(grammar, f'{{{blanks}"people": [], "done": true}}'), blanks


def test_null_within_a_schema_is_a_value() -> None:
    assert takes(of_schema({"enum": [None, 1]}), "null")
    assert takes(of_schema({"const": None}), "null")


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(count)}}


REFUSED: list[tuple[Any, str]] = [
    ({"type": "json_schema"}, "needs a json_schema"),
    ({"type": "json_object", "json_schema": {"name": "n", "schema": {}}}, "only with the type json_schema"),
]
BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "nope"}, "Invalid type: nope"),
    ({"type": "object", "properties": 3}, "properties must be an object"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "format": "nope"}, "Unknown format"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {}}, "not"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ({"$ref": "http://127.0.0.1:9/schema"}, "not present"),
    ({"x-guidance": {"nope": 1}}, "unknown field"),
    ({"title": "x" * MAX_GRAMMAR_BYTES}, "bytes"),
    ({"multipleOf": MAX_MULTIPLE + 1}, "multipleOf"),
    ({"items": [{"multipleOf": 0.001}, {"multipleOf": 11}]}, "multipleOf"),
    ({"properties": {str(n): {"multipleOf": n} for n in (7, 11, 13, 17)}}, "multipleOf"),
    ({"multipleOf": 10**30}, "multipleOf"),
    ({"multipleOf": 0}, "multiple"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"properties": {"a": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}}, "$ref"),
    ({"items": {"anyOf": [{"$ref": "#/items"}, {"$ref": "#/items/anyOf/1"}]}}, "leads back to itself"),
    (optional(2100), "too big"),
]


@pytest.mark.parametrize(
    ("asked", "why"),
    [*REFUSED, *(({"type": "json_schema", "json_schema": {"schema": bad}}, why) for bad, why in BAD_SCHEMAS)],
)
def test_what_cannot_be_followed_is_refused_by_name_and_says_why(asked: Any, why: str) -> None:
    with pytest.raises(InvalidParameter, match="response_format") as refused:
        of(asked)
    assert refused.value.param == "response_format"
    assert why in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_schema_may_be_nested_only_so_deep() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidParameter, match="recursion"):
        of_schema(schema)


def test_steps_that_are_in_use_are_served() -> None:
    for step in (5, 0.01, 0.25, 100, 1000):
        assert of_schema({"type": "number", "multipleOf": step})
    assert of_schema(
        {"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 5}, "multipleOf": {"type": "null"}}}
    )


def test_a_schema_may_refer_to_itself_where_there_is_an_end() -> None:
    trees = [
        {
            "type": "object",
            "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
            "additionalProperties": False,
        },
        {
            "anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "array", "items": {"$ref": "#"}}],
            "$defs": {"leaf": {"const": 1}},
        },
        {"anyOf": [{"$ref": "#"}, {"const": 1}]},
        {"$ref": "#leaf", "$defs": {"x": {"$anchor": "leaf", "const": 1}}},
    ]
    for schema, text in zip(trees, ('{"left": {"right": {}}}', "[1, [[]]]", "1", "1"), strict=True):
        assert takes(of_schema(schema), text), text


def test_what_is_taken_can_be_followed_whatever_may_be_left_out() -> None:
    """Every property that may come next is kept in mind at once: a worker must not find them to be too many."""
    grammar = of_schema(optional(1500))
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
    for byte in b'{"p7": 1, "p1499": 2, "else": 3}':
        matcher.compute_bitmask()
        assert matcher.consume_token(byte), matcher.get_error()
    assert matcher.is_accepting()


def test_schemas_made_to_be_dear_are_refused_or_cheap() -> None:
    all_of = {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"const": j}}} for j in range(4)]} for i in range(9)]}
    doubling = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)}
    dear = [
        all_of,
        {"$ref": "#/$defs/a0", "$defs": {**doubling, "a25": {"type": "integer"}}},
        {"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"},
        {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1500)}},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    ]
    for schema in dear:
        begun_s = time.process_time()
        try:
            of_schema(schema)
        except InvalidParameter as refused:
            assert refused.param == "response_format"  # noqa: PT017 - to be refused is one of two good ends
        assert time.process_time() - begun_s < 2, str(schema)[:80]


def test_a_grammar_of_another_kind_is_checked_likewise() -> None:
    check_grammar(LLMatcher.grammar_from_lark('start: "a" | "b"'), "tools")
    for bad in ("nonsense", "x" * (MAX_GRAMMAR_BYTES + 1), LLMatcher.grammar_from_lark("start: missing")):
        with pytest.raises(InvalidParameter) as refused:
            check_grammar(bad, "tools")
        assert refused.value.param == "tools"
