"""Calls in the text of an answer: found in each layout, however the text is split, and nothing of it is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tool_calls import HERMES, LLAMA, MISTRAL, CallParser, Layout, layout_of
from services.gateway.tool_reading import Reading

NAMES = frozenset({"f", "get_weather"})
LAYOUTS = [HERMES, MISTRAL, LLAMA]
A = {"city": "Zürich </tool_call> } ]", "n": [1, {"x": '\\"'}]}
Calls = list[tuple[str, str]]


def read(layout: Layout, pieces: list[str], *, most: int | None = None) -> tuple[str, Calls]:
    parser = CallParser(layout, NAMES, most=most)
    content, calls = "", list[tuple[str, str]]()
    for got in [*map(parser.push, pieces), parser.end()]:
        content += got.content
        for piece in got.calls:
            if piece.name is not None:
                assert piece.index == len(calls), "calls come in order"
                calls.append((piece.name, piece.arguments))
            else:
                assert piece.index == len(calls) - 1, "pieces belong to the last call"
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + piece.arguments)
    assert parser.calls in {len(calls), len(calls) - 1}, "the last one may not be whole"
    return content, calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def mistral(*calls: tuple[str, str]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)


ONE = ("f", json.dumps(A, ensure_ascii=False))
TWO = ("get_weather", "{}")

CASES: list[tuple[Layout, str, str, Calls]] = [
    (HERMES, hermes(*ONE), "", [ONE]),
    (HERMES, f"Let me see.\n{hermes(*ONE)}\n{hermes(*TWO)}\n", "Let me see.", [ONE, TWO]),
    (HERMES, f"{hermes(*TWO)} and then", " and then", [TWO]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a":1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a":1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "{x"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')]),
    (HERMES, hermes("nobody", "{}"), hermes("nobody", "{}"), []),
    (HERMES, f"<tool_call>no <tool_call> {hermes(*TWO)}", "<tool_call>no <tool_call>", [TWO]),
    (HERMES, f'<tool_call>{{"a": {hermes(*TWO)}', '<tool_call>{"a":', [TWO]),
    (HERMES, "  <tool_call>  ", "  <tool_call>  ", []),
    (HERMES, "a <tool", "a <tool", []),
    (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    (MISTRAL, mistral(ONE), "", [ONE]),
    (MISTRAL, mistral(ONE, TWO), "", [ONE, TWO]),
    (MISTRAL, f"So: {mistral(TWO)} ok", "So: ok", [TWO]),
    (MISTRAL, '[TOOL_CALLS][{"name":"f","arguments":{},"id":"123456789"}]', "", [("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS] [{"name":"f","arguments":{}}, 5]', ", 5]", [("f", "{}")]),
    (MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    (LLAMA, llama(ONE), "", [ONE]),
    (LLAMA, "\n" + llama(ONE, TWO), "", [ONE, TWO]),
    (LLAMA, "<|python_tag|>" + llama(TWO), "", [TWO]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, '{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}', []),
    (LLAMA, ' {"answer": 5}\n', ' {"answer": 5}\n', []),
    (LLAMA, f"Sure: {llama(TWO)}", f"Sure: {llama(TWO)}", []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
]


@pytest.mark.parametrize(("layout", "text", "content", "calls"), CASES)
def test_calls_and_content_are_told_apart_in_one_piece_and_letter_by_letter(
    layout: Layout, text: str, content: str, calls: Calls
) -> None:
    assert read(layout, [text]) == (content, calls)
    assert read(layout, list(text)) == (content, calls)


MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "<")
PARTS = ('{"name": "f", "arguments": {', '"a": "x', "}}", '{"name": "get_weather", "parameters": {}}', '"name"')
SIGNS = ('"', "{", "}", "[", "]", "\\", ";", ",", " ", "\n", "text", "é", ":", '{"arguments": {}, "name": "f"}')
WHOLE = (hermes(*ONE), mistral(ONE, TWO), llama(TWO), llama(TWO, ONE))
BITS = st.sampled_from((*MARKS, *PARTS, *SIGNS, *WHOLE))
TEXTS = st.lists(BITS | st.text(max_size=3), max_size=14).map("".join)


@st.composite
def split(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [None, 1])
@given(case=split())
def test_however_a_text_is_split_the_same_comes_out(
    layout: Layout, most: int | None, case: tuple[str, list[str]]
) -> None:
    text, pieces = case
    content, calls = read(layout, [text], most=most)
    assert read(layout, pieces, most=most) == (content, calls)
    if not calls:
        assert content == text, "nothing is lost"
    assert most is None or len(calls) <= most
    assert all(name in NAMES for name, _ in calls)


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{"), max_size=9)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=3
)


@pytest.mark.parametrize("layout", [HERMES, MISTRAL])
@given(parts=st.lists(st.tuples(WORDS, ARGUMENTS), max_size=3), last=WORDS)
def test_what_stands_between_calls_is_content_and_all_calls_are_found(
    layout: Layout, parts: list[tuple[str, dict[str, object]]], last: str
) -> None:
    calls = [("f", json.dumps(arguments)) for _, arguments in parts]
    written = [hermes(*call) if layout is HERMES else mistral(call) for call in calls]
    text = "".join(words + call for (words, _), call in zip(parts, written, strict=True)) + last
    expected = "".join(words.rstrip() for words, _ in parts) + (last.rstrip() if parts else last)
    assert read(layout, [text]) == (expected, calls)


def test_at_most_one_call_is_one_and_the_rest_is_content() -> None:
    text = f"{hermes(*TWO)}\n{hermes(*ONE)}"
    assert read(HERMES, [text], most=1) == (f"\n{hermes(*ONE)}", [TWO])
    assert read(LLAMA, [llama(TWO, ONE)], most=1) == (f"; {llama(ONE)}", [TWO])


def test_text_is_held_back_only_while_it_may_be_a_mark_and_arguments_not_at_all() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.push("see <b> <to").content == "see <b>"
    assert parser.push("y> ").content == " <toy>"
    assert parser.push('<tool_call>{"name": "f", "argu').calls == ()
    (begun,) = parser.push('ments": {"a"').calls
    assert (begun.index, begun.name, begun.arguments) == (0, "f", '{"a"')
    (more,) = parser.push(": 1").calls
    assert (more.index, more.name, more.arguments) == (0, None, ": 1")


def test_a_model_that_repeats_itself_costs_no_more_than_its_text_is_long() -> None:
    for text in ('<tool_call>{"' * 5000, "<tool_call>{" * 5000, '<tool_call>{"a": [' * 5000):
        content, calls = read(HERMES, list(text))
        assert (content, calls) == (text, [])


QWEN = '{%- if tools %}{{- "<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>" }}{% endif %}'


@pytest.mark.parametrize(
    ("template", "layout"),
    [
        (QWEN, HERMES),
        ("{% for call in message.tool_calls %}[TOOL_CALLS] {% endfor %}", MISTRAL),
        ('{{ \'{"name": function name, "parameters": dictionary}\' }}', LLAMA),
        ('{{ "{\\"name\\": x, \\"parameters\\": y}" }}', LLAMA),
        ("<tool_call><function=f><parameter=a>1</parameter></function></tool_call> arguments", None),
        ("[TOOL_CALLS]f[ARGS]{}", None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ("", None),
    ],
)
def test_the_layout_is_known_by_the_chat_template(template: str, layout: Layout | None) -> None:
    assert layout_of(template) == layout


def test_every_call_has_an_id_of_its_own_in_its_first_piece_only() -> None:
    reading = Reading(CallParser(HERMES, NAMES), HERMES)
    calls = [call for character in hermes(*TWO) + hermes(*ONE) for call in reading.read(character, is_over=False)[1]]
    ids = [call.id for call in calls if call.id is not None]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)
    assert [call.index for call in calls if call.name is not None] == [0, 1]
    (short,) = Reading(CallParser(MISTRAL, NAMES), MISTRAL).read(mistral(TWO), is_over=True)[1]
    assert short.id is not None
    assert len(short.id) == 9
