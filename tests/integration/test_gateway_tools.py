"""Tools over real HTTP, the official client among others, with a pool played by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher
from openai import AsyncOpenAI

from services.worker.fake_tokenizer import EOS_ID, fake_tokenizer_files
from shared.protocol.messages import PoolReport, SubmitRequest
from tests.integration.gateway_pool import MODEL, Setting, events, gateway

TEMPLATE = (
    "{% if tools %}<tool_call> arguments{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    "{% if enable_thinking is false %}!{% endif %}"
)
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "g"}},
]
ANSWER = (
    'See:\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n<tool_call>{"name":"g","arguments":{}}'
)
CLOSE = "</tool_call>"


@asynccontextmanager
async def with_tools() -> AsyncIterator[Setting]:
    async with gateway(is_up=False) as setting:
        files = msgspec.structs.replace(fake_tokenizer_files(), chat_template=TEMPLATE)
        await setting.pool.publish_tokenizer(files)
        setting.pool.report = PoolReport(workers=1, length_served=1000)
        await setting.pool.held()
        await setting.client.until_ready()
        yield setting


async def answered(setting: Setting, text: str, *, is_cut: bool = False) -> SubmitRequest:
    submit = await setting.pool.next(SubmitRequest)
    data = text.encode()
    for index in range(0, len(data), 7):
        await setting.pool.tokens(submit, data[index : index + 7], first=index)
    await setting.pool.tokens(
        submit, b"" if is_cut else [EOS_ID], first=len(data), finish="length" if is_cut else "stop"
    )
    return submit


@asynccontextmanager
async def openai(setting: Setting) -> AsyncIterator[AsyncOpenAI]:
    base_url = f"http://127.0.0.1:{setting.port.result()}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_the_official_client_reads_calls_of_a_whole_answer_and_sends_them_back() -> None:
    async with with_tools() as setting, asyncio.TaskGroup() as tasks, openai(setting) as client:
        tasks.create_task(answered(setting, ANSWER + CLOSE))
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "See:"
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [("f", '{"a": "é"}'), ("g", "{}")]
        assert len({call.id for call in calls if call.id.startswith("call_")}) == 2
        results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
        next_turn = tasks.create_task(answered(setting, "Well."))
        messages += [choice.message, *results]
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        assert answer.choices[0].message.tool_calls is None
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Well.", "stop")
        assert "'arguments': {'a': 'é'}" in bytes(next_turn.result().prompt_ids).decode()


async def test_the_official_client_puts_streamed_calls_together() -> None:
    async with with_tools() as setting, asyncio.TaskGroup() as tasks, openai(setting) as client:
        tasks.create_task(answered(setting, ANSWER.removeprefix("See:\n") + CLOSE))
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=TOOLS, stream=True
        )
        begun: dict[int, tuple[str, str]] = {}
        arguments: dict[int, list[str]] = {}
        reasons, content = [], ""
        async for chunk in stream:
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.index not in begun:
                    assert (call.type, bool(call.id)) == ("function", True)
                    begun[call.index] = (call.function.name or "", call.id or "")
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                arguments.setdefault(call.index, []).append(call.function.arguments or "")
        assert (content, reasons) == ("", ["tool_calls"])
        assert {index: name for index, (name, _) in begun.items()} == {0: "f", 1: "g"}
        assert {index: "".join(pieces) for index, pieces in arguments.items()} == {0: '{"a": "é"}', 1: "{}"}
        assert len(arguments[0]) > 1, "arguments come as they are made"


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    async with with_tools() as setting, asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, '<tool_call>{"name":"g","arguments":{}}</tool_call>\n'))
        async with setting.client.chat(tools=TOOLS) as response:
            (choice,) = (await response.json())["choices"]
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_only_with_the_choice_none_calls_stay_text(choice: str) -> None:
    text = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
    async with with_tools() as setting, asyncio.TaskGroup() as tasks:
        tasks.create_task(answered(setting, text))
        async with setting.client.chat(tools=TOOLS, tool_choice=choice) as response:
            (told,) = (await response.json())["choices"]
    is_text = choice == "none"
    assert (told["message"]["content"] == text) is is_text
    assert told["finish_reason"] == ("stop" if is_text else "tool_calls")


async def test_an_answer_that_is_cut_off_in_a_call_says_so_whole_and_streamed() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a": [1, '
    async with with_tools() as setting:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answered(setting, text, is_cut=True))
            async with setting.client.chat(tools=TOOLS) as response:
                (told,) = (await response.json())["choices"]
        assert told["finish_reason"] == "length"
        assert told["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": [1, '
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answered(setting, text, is_cut=True))
            async with setting.client.chat(tools=TOOLS, stream=True) as response:
                chunks = await events(response)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_forced_call_reaches_the_worker_as_a_grammar_and_a_free_one_does_not() -> None:
    text = '<tool_call>{"name":"g","arguments":{}}</tool_call>'
    async with with_tools() as setting:
        for choice, is_forced in (
            ("required", True),
            ({"type": "function", "function": {"name": "g"}}, True),
            ("auto", False),
        ):
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(answered(setting, text))
                async with setting.client.chat(tools=TOOLS, tool_choice=choice, n=1) as response:
                    assert response.status == 200
            grammar = asked.result().sampling.grammar
            assert bool(grammar) is is_forced
            if is_forced:
                assert LLMatcher.validate_grammar(grammar) == ""


async def test_a_refusal_names_the_field_and_no_worker_hears_of_it() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    bad = [{"type": "function", "function": {"name": "h", "parameters": schema}}]
    async with with_tools() as setting:
        for fields, param in (
            ({"tools": bad, "tool_choice": "required"}, "tools[0].function.parameters"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
            ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ):
            async with setting.client.chat(**fields) as response:
                assert (response.status, (await response.json())["error"]["param"]) == (400, param)
        assert await setting.pool.nothing_more()
    async with gateway() as setting, setting.client.chat(tools=TOOLS) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "tools")


async def test_tokenize_counts_tools_and_what_the_template_is_told() -> None:
    async with with_tools() as setting:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        counts = []
        for more in ({}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}):
            async with setting.client.session.post("/tokenize", json={**body, **more}) as response:
                assert response.status == 200
                counts.append((await response.json())["count"])
        assert counts == [counts[0], counts[0] + len("<tool_call> arguments"), counts[0] + 1]
        for more, param in (
            ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs"),
            ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ):
            async with setting.client.session.post("/tokenize", json={**body, **more}) as response:
                assert (response.status, (await response.json())["error"]["param"]) == (400, param)
