"""Tools and template arguments of a chat: what is taken, what is refused by name, what the template is given."""

from typing import Any

import msgspec
import pytest

from services.gateway.asked import check, prompt_ids_of
from services.gateway.asked_tools import chat_of, tool_use_of
from services.gateway.bodies import ChatBody, read_body
from services.gateway.nested import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import fake_tokenizer_files
from shared.errors import InvalidParameter

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}<tool_call> arguments {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}{% if enable_thinking is false %}<no>{% endif %}"
)


def tokenizer_of(template: str) -> ModelTokenizer:
    return ModelTokenizer(msgspec.structs.replace(fake_tokenizer_files(), chat_template=template))


WITH_TOOLS = tokenizer_of(TEMPLATE)
WITHOUT = ModelTokenizer(fake_tokenizer_files())


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def chat(**fields: Any) -> ChatBody:
    body = read_body(ChatBody, msgspec.json.encode({"model": "m", "messages": MESSAGES, **fields}))
    check(body)
    return body


def prompt(tokenizer: ModelTokenizer = WITH_TOOLS, **fields: Any) -> str:
    (ids,) = prompt_ids_of(chat(**fields), tokenizer, 100_000)
    return tokenizer.decode(ids)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


BIG = {"a": "x" * (MAX_CHARACTERS + 1)}
LONG = {"a": [0] * (MAX_VALUES + 1)}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(), tool("a b")]}, "tools[1].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool("f\n")]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(nope=1)]}, "tools[0].function.nope"),
    ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
    ({"tools": [tool(parameters=nested(MAX_DEPTH + 1))]}, "tools"),
    ({"tools": [tool(parameters=BIG)]}, "tools"),
    ({"tools": [tool(parameters=LONG)]}, "tools"),
    ({"tools": 5}, "tools"),
    ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": tool("g")}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": tool()}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": nested(MAX_DEPTH)}, "chat_template_kwargs"),
    ({"chat_template_kwargs": BIG}, "chat_template_kwargs"),
    ({"chat_template_kwargs": LONG}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_not_taken_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_null_means_the_default() -> None:
    body = chat(tools=None, tool_choice=None, parallel_tool_calls=None, chat_template_kwargs=None, timeout=None)
    assert (body.tools, body.tool_choice, body.parallel_tool_calls, body.timeout) == (None, None, True, None)
    chat(tools=[tool(description=None, parameters=None, strict=None)])


def test_a_template_without_tools_takes_none_and_says_so() -> None:
    for choice in ("auto", "none", "required"):
        with pytest.raises(InvalidParameter) as refused:
            prompt(WITHOUT, tools=[tool()], tool_choice=choice)
        assert refused.value.param == "tools"
    assert prompt(WITHOUT, tools=[], tool_choice="none") == "user: hi\nassistant: "


def test_calls_in_a_layout_that_is_not_read_are_refused_unless_there_will_be_none() -> None:
    strange = tokenizer_of("{{ tools }}{{ messages }}")
    with pytest.raises(InvalidParameter) as refused:
        tool_use_of(chat(tools=[tool()]), strange)
    assert refused.value.param == "tools"
    assert tool_use_of(chat(tools=[tool()], tool_choice="none"), strange) is None


def test_the_template_gets_definitions_in_one_order_and_without_what_is_not_for_the_model() -> None:
    told = prompt(tools=[{"function": {"strict": True, "description": "d", "name": "f"}, "type": "function"}])
    assert '[{"type": "function", "function": {"name": "f", "description": "d"}}]' in told
    assert prompt(tools=[tool()], tool_choice="none") == prompt(tools=[tool()]), (
        "the model is told of them all the same"
    )


def test_calls_of_earlier_turns_are_handed_on_as_objects_and_results_with_their_id() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    assert prompt(messages=turns) == "user:hi\nassistant:fBern\ntool:rainc1\n"
    (_, told, _) = chat_of(chat(messages=turns).messages).messages
    assert told["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"city": "Bern"}}}]


@pytest.mark.parametrize("arguments", ["{", "[]", "5", '{"a":' * 40 + "1" + "}" * 40, "[" * 100_000])
def test_arguments_of_earlier_turns_that_are_no_object_are_refused_by_name(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidParameter) as refused:
        prompt(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


def test_the_template_is_told_what_the_client_says() -> None:
    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith("<no>")
    assert not prompt(chat_template_kwargs={"enable_thinking": True}).endswith("<no>")


def test_marks_that_are_special_tokens_are_kept_where_calls_are_read_and_dropped_elsewhere() -> None:
    from tokenizers import AddedToken, Tokenizer  # noqa: PLC0415 - for this test alone

    files = fake_tokenizer_files()
    raw = Tokenizer.from_str(files.tokenizer_json.decode())
    raw.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    data = raw.to_str().encode()
    own = ModelTokenizer(msgspec.structs.replace(files, tokenizer_json=data, chat_template="{{ tools }}[TOOL_CALLS]"))
    ids = raw.encode("é[TOOL_CALLS] [{}]").ids
    for keeps, text in ((True, "é[TOOL_CALLS] [{}]"), (False, "é [{}]")):
        detokenizer = own.detokenizer(keeps_marks=keeps)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.end() == text
