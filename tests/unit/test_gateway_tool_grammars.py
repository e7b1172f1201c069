"""Grammars of forced calls: llguidance takes what the parser reads, and nothing else."""

from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from services.gateway.asked import check
from services.gateway.asked_sampling import sampling_of
from services.gateway.bodies import ChatBody, read_body
from services.gateway.grammars import fault_of
from services.gateway.tokenizer import ModelTokenizer
from services.gateway.tool_calls import HERMES, LLAMA, MISTRAL, CallParser, Layout
from services.gateway.tool_grammars import Functions, may_call, must_call
from services.worker.fake_tokenizer import EOS_ID, fake_tokenizer_files
from shared.errors import InvalidParameter

FUNCTIONS: Functions = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"type": "string"}},
    },
    "get_time": None,
}
WEATHER = '{"name": "get_weather", "%s": {"city": "Zürich", "days": 3}}'
TIME = '{"name": "get_time", "%s": {}}'
LAYOUTS = [HERMES, MISTRAL, LLAMA]


def files_with(*marks: AddedToken, template: str | None = None) -> Any:
    files = fake_tokenizer_files()
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    tokenizer.add_tokens(list(marks))
    data = tokenizer.to_str().encode()
    return msgspec.structs.replace(files, tokenizer_json=data, chat_template=template or files.chat_template)


class Model:
    """A tokenizer in which the marks of a layout are text, or tokens of their own."""

    def __init__(self, layout: Layout, kind: str) -> None:
        marks = [layout.opening, layout.closing] if len(layout.closing) > 1 else [layout.opening]
        added = [AddedToken(mark, special=kind == "special", normalized=False) for mark in marks]
        files = files_with(*(added if kind != "text" else ()))
        self.tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
        ids = {mark: self.tokenizer.token_to_id(mark) for mark in marks}
        self.marker_ids = {mark: one for mark, one in ids.items() if one is not None and kind != "text"}
        self._ll = LLTokenizer(files.tokenizer_json.decode(), eos_token=[EOS_ID])

    def takes(self, grammar: str, text: str) -> bool:
        """Say whether a text follows a grammar to an end."""
        assert LLMatcher.validate_grammar(grammar, self._ll) == ""
        matcher = LLMatcher(self._ll, grammar)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        taken = matcher.try_consume_tokens(ids)
        assert not matcher.is_error(), matcher.get_error()
        return taken == len(ids) and matcher.is_accepting()


def written(layout: Layout, *calls: str) -> str:
    told = [call % layout.arguments for call in calls]
    if layout is HERMES:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in told)
    return f"[TOOL_CALLS] [{', '.join(told)}]" if layout is MISTRAL else "; ".join(told)


@pytest.mark.parametrize("kind", ["text", "plain", "special"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forced_answer_is_calls_of_the_functions_with_their_schemas_and_nothing_else(
    layout: Layout, kind: str
) -> None:
    model = Model(layout, kind)
    one = must_call(layout, FUNCTIONS, model.marker_ids, most=1)
    several = must_call(layout, FUNCTIONS, model.marker_ids, most=None)
    for grammar in (one, several):
        assert model.takes(grammar, written(layout, WEATHER))
        assert model.takes(grammar, written(layout, TIME))
        assert not model.takes(grammar, "Hello")
        assert not model.takes(grammar, "")
        assert not model.takes(grammar, f"So: {written(layout, TIME)}")
        assert not model.takes(grammar, written(layout, WEATHER.replace("3", '"x"')))
        assert not model.takes(grammar, written(layout, TIME.replace("{}", '{"a": 1}')))
        assert not model.takes(grammar, written(layout, TIME.replace("get_time", "nobody")))
    assert model.takes(several, written(layout, WEATHER, TIME, WEATHER))
    assert not model.takes(one, written(layout, WEATHER, TIME))


@pytest.mark.parametrize("kind", ["text", "plain", "special"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_free_answer_may_be_text_but_a_call_in_it_is_a_proper_one(layout: Layout, kind: str) -> None:
    model = Model(layout, kind)
    one = may_call(layout, FUNCTIONS, model.marker_ids, most=1)
    several = may_call(layout, FUNCTIONS, model.marker_ids, most=None)
    for grammar in (one, several):
        assert model.takes(grammar, "Hello, <b>you</b>.\n")
        assert model.takes(grammar, "")
        assert model.takes(grammar, written(layout, WEATHER))
        assert not model.takes(grammar, written(layout, WEATHER.replace("3", '"x"')))
    assert not model.takes(one, written(layout, WEATHER, TIME))
    assert model.takes(several, written(layout, WEATHER, TIME))
    if layout is not LLAMA:
        assert model.takes(one, f"Let me see.\n{written(layout, TIME)}")
        assert model.takes(several, f"Let me see.\n{written(layout, TIME)}\nAnd {written(layout, WEATHER)} so")
        assert not model.takes(one, f"{written(layout, TIME)}\nAnd {written(layout, WEATHER)}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_grammar_lets_pass_the_parser_reads(layout: Layout) -> None:
    parser = CallParser(layout, frozenset(FUNCTIONS))
    read = [parser.push(written(layout, WEATHER, TIME)), parser.end()]
    assert "".join(one.content for one in read) == ""
    calls = [call for one in read for call in one.calls]
    assert [call.name for call in calls if call.name] == ["get_weather", "get_time"]


TEMPLATE = "{{ tools }}<tool_call> arguments {{ messages }}"
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
]


def grammar_of(**fields: Any) -> str:
    tokenizer = ModelTokenizer(files_with(template=TEMPLATE))
    data = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    body = read_body(ChatBody, msgspec.json.encode(data))
    check(body)
    return sampling_of(body, tokenizer, 1).grammar


def test_an_answer_is_free_unless_the_request_asks_for_something_that_has_to_be_enforced() -> None:
    assert grammar_of() == grammar_of(tool_choice="auto") == grammar_of(tool_choice="none") == ""
    assert grammar_of(tool_choice="none", parallel_tool_calls=False) == ""
    model, call = Model(HERMES, "text"), '{"name": "%s", "arguments": {}}'
    both = written(HERMES, call % "f" + "%.0s", call % "g" + "%.0s")
    first = written(HERMES, call % "f" + "%.0s")
    assert model.takes(grammar_of(tool_choice="required"), both)
    assert not model.takes(grammar_of(tool_choice="required", parallel_tool_calls=False), both)
    named = {"type": "function", "function": {"name": "g"}}
    assert not model.takes(grammar_of(tool_choice=named), first)
    assert model.takes(grammar_of(tool_choice=named), written(HERMES, call % "g" + "%.0s"))
    assert model.takes(grammar_of(parallel_tool_calls=False), "just text")
    assert not model.takes(grammar_of(parallel_tool_calls=False), both)


@pytest.mark.parametrize(
    "schema", [{"properties": {"a": {"type": "nope"}}}, {"type": "object", "properties": {"a": {"not": {}}}}]
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name_where_it_has_to_be(schema: Any) -> None:
    bad = [TOOLS[0], {"type": "function", "function": {"name": "h", "parameters": schema, "strict": True}}]
    for fields in ({"tool_choice": "required"}, {}):
        with pytest.raises(InvalidParameter) as refused:
            grammar_of(tools=bad, **fields)
        assert refused.value.param == "tools[1].function.parameters"
    free = [TOOLS[0], {"type": "function", "function": {"name": "h", "parameters": schema}}]
    assert grammar_of(tools=free) == ""


@pytest.mark.parametrize("strict", [{"tool_choice": "required"}, {"strict": True}])
def test_a_schema_that_would_cost_a_worker_its_memory_is_refused_in_a_tool_too(strict: dict[str, Any]) -> None:
    dear = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 104_729_000}}}
    function = {"name": "h", "parameters": dear, **({"strict": True} if "strict" in strict else {})}
    choice = {name: value for name, value in strict.items() if name == "tool_choice"}
    with pytest.raises(InvalidParameter, match="multipleOf is served up to") as refused:
        grammar_of(tools=[TOOLS[0], {"type": "function", "function": function}], **choice)
    assert refused.value.param == "tools[1].function.parameters"


def test_a_grammar_that_holds_has_no_fault() -> None:
    assert fault_of(must_call(HERMES, FUNCTIONS, {}, most=None)) == ""
