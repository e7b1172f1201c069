"""Bodies: what is taken, what is refused, and that a refusal names the field."""

from typing import Any

import msgspec
import pytest

from services.gateway.asked import (
    answers_each,
    check_least,
    limits_of,
    stops_of,
    told_logprobs,
)
from services.gateway.asked_sampling import sampling_of, sampling_of_choice
from services.gateway.asked_tools import chat_of
from services.gateway.bodies import ChatBody, CompletionBody, read_body
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import VOCABULARY, fake_tokenizer_files
from shared.errors import InvalidParameter, PromptTooLong
from shared.protocol.messages import Bias, Sampling
from tests.unit.gateway_words import MESSAGES, TOKENIZER, chat, completion

ACCEPTED = [
    {},
    {"temperature": 0},
    {"temperature": 2.0, "top_p": 1, "top_k": -1},
    {"temperature": None, "top_p": None, "stop": None, "seed": None, "max_tokens": None, "n": None, "stream": None},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": "\n"},
    {"stop": ["a", "b", "c", "d"]},
    {"stop": []},
    {"n": 1},
    {"user": "me", "metadata": {"a": "b"}, "store": False},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": None}},
    {"stream": True, "stream_options": {}},
    {"ignore_eos": True, "max_tokens": 1},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}},
    {"tools": None, "response_format": None, "logit_bias": None, "functions": None, "audio": None},
    {"logprobs": None, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0},
    {"n": 2},
    {"n": 128, "stream": True},
    {"min_p": 0, "repetition_penalty": 1.0, "min_tokens": 0, "priority": 0, "best_of": 1, "echo": False},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.3, "min_p": 1, "min_tokens": 3},
    {"presence_penalty": None, "frequency_penalty": None, "repetition_penalty": None, "min_p": None},
    {"min_tokens": None, "logit_bias": None, "stop_token_ids": None},
    {"logit_bias": {"5": -100, "7": 100.0}, "stop_token_ids": [1, 2]},
    {"priority": -100, "cache_salt": "s"},
    {"priority": 100, "cache_salt": "é" * 256},
    {"priority": None, "cache_salt": None},
]

REFUSED = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 999999}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "a"}, "n"),
    ({"n": True}, "n"),
    ({"n": 0, "stream": True}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
    ({"priority": -101}, "priority"),
    ({"priority": 101}, "priority"),
    ({"priority": 2**70}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"priority": True}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "é" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ["s"]}, "cache_salt"),
    ({"store": True}, "store"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": 3600.5}, "timeout"),
    ({"timeout": "soon"}, "timeout"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "nope"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": None}, "top_logprobs"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"5": "much"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1.5}, "min_tokens"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 1000}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"guided_json": {}}, "guided_json"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"no_such_field": None}, "no_such_field"),
]

REFUSED_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "pirate", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "4"}]}, "messages[1].tool_call_id"),
    ({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "c"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "hi", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "user", "content": "hi", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
    ({"prompt": "hi"}, "prompt"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_what_asks_for_nothing_else_is_taken_on_both_routes(fields: dict[str, Any]) -> None:
    assert chat(**fields).model == "m"
    assert completion(**fields).model == "m"


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_refusal_names_the_field_on_both_routes(fields: dict[str, Any], param: str) -> None:
    for read in (chat, completion):
        with pytest.raises(InvalidParameter) as refused:
            read(**fields)
        assert refused.value.param == param
        assert param in str(refused.value)


@pytest.mark.parametrize(("fields", "param"), REFUSED_CHATS)
def test_a_refused_chat_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model":"m","messages":[{"role":"user","content":"x"}], x}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    ],
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidParameter, match="body"):
        read_body(ChatBody, data)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_body(CompletionBody, b'{"model":"m"}')
    assert refused.value.param == "prompt"


def test_text_parts_become_one_text_and_a_developer_speaks_as_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert chat_of(body.messages).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]


def test_the_models_own_defaults_stand_where_the_request_says_nothing() -> None:
    defaults = Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    own = ModelTokenizer(msgspec.structs.replace(fake_tokenizer_files(), defaults=defaults))
    assert sampling_of(chat(), own, 7) == msgspec.structs.replace(defaults, seed=7)
    asked = chat(temperature=0, top_p=0.5, top_k=-1, seed=3, min_p=0, repetition_penalty=1)
    assert sampling_of(asked, own, 7) == Sampling(0.0, 0.5, 0, 3)


def test_all_that_changes_a_draw_reaches_the_worker() -> None:
    asked = completion(
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        min_tokens=3,
        logit_bias={"5": -100, "7": 0, "250": 2.5},
        stop_token_ids=[9, 3, 9],
    )
    assert sampling_of(asked, TOKENIZER, 7) == Sampling(
        1, 1, 0, 7, 0.25, 1, -1.5, 1.2, 3, (Bias(5, -100), Bias(250, 2.5)), (9, 3)
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"191222999": -100}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ],
)
def test_bb_26_tokens_that_the_model_does_not_have_are_refused_by_the_name_of_their_field(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        sampling_of(completion(**fields), TOKENIZER, 7)
    assert refused.value.param == param


def test_each_route_asks_for_logprobs_in_its_own_way() -> None:
    assert [told_logprobs(chat(**fields)) for fields in ({}, {"logprobs": True}, {"logprobs": False})] == [
        None,
        0,
        None,
    ]
    assert told_logprobs(chat(logprobs=True, top_logprobs=20)) == 20
    assert [told_logprobs(completion(**fields)) for fields in ({}, {"logprobs": 0}, {"logprobs": 5})] == [None, 0, 5]


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (chat, {"logprobs": 0}, "logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (chat, {"best_of": 2}, "best_of"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"logprobs": 25}, "logprobs"),
        (completion, {"logprobs": 6}, "logprobs"),
        (completion, {"logprobs": -1}, "logprobs"),
        (completion, {"n": 2, "best_of": 1}, "best_of"),
        (completion, {"n": 2, "best_of": 3, "stream": True}, "best_of"),
    ],
)
def test_bb_26_what_one_route_does_not_take_is_refused_by_name(read: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read(**fields)
    assert refused.value.param == param


def test_the_best_are_chosen_by_logprobs_though_none_are_told() -> None:
    assert sampling_of(completion(n=1, best_of=3), TOKENIZER, 7).logprobs == 0
    assert sampling_of(completion(n=1, best_of=3, logprobs=2), TOKENIZER, 7).logprobs == 2
    assert sampling_of(completion(n=3, best_of=3), TOKENIZER, 7).logprobs is None
    assert answers_each(completion(n=2)) == answers_each(chat(n=2)) == 2
    assert answers_each(completion(n=1, best_of=3)) == 3


def test_an_answer_cannot_have_to_be_longer_than_it_may_be() -> None:
    check_least(chat(min_tokens=5), 5)
    with pytest.raises(InvalidParameter, match="6 is more than the 5 tokens") as refused:
        check_least(chat(min_tokens=6), 5)
    assert refused.value.param == "min_tokens"


def test_every_choice_has_a_seed_of_its_own_and_the_first_one_that_of_the_request() -> None:
    asked = Sampling(seed=5, top_k=3)
    seeds = [sampling_of_choice(asked, choice).seed for choice in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert seeds == [sampling_of_choice(asked, choice).seed for choice in range(100)]
    assert sampling_of_choice(asked, 1).top_k == 3


def test_who_says_nothing_of_it_is_neither_urgent_nor_salted() -> None:
    for body in (chat(), completion(priority=None, cache_salt=None)):
        assert (body.priority, body.cache_salt) == (0, None)


def test_stop_strings_are_a_list_whatever_form_they_came_in() -> None:
    assert stops_of(chat()) == ()
    assert stops_of(chat(stop="a")) == ("a",)
    assert stops_of(chat(stop=["a", "b"])) == ("a", "b")


def test_a_chat_gets_all_the_room_there_is_and_a_completion_sixteen_tokens() -> None:
    assert limits_of(chat(), 100).max_tokens(40) == 60
    assert limits_of(completion(), 100).max_tokens(40) == 16
    assert limits_of(completion(), 100).max_tokens(90) == 10
    assert limits_of(chat(max_tokens=5), 100).max_tokens(40) == 5
    assert limits_of(chat(max_tokens=5, max_completion_tokens=6), 100).max_tokens(40) == 6


def test_no_tokens_are_asked_for_only_with_echo_and_one_is_generated_all_the_same() -> None:
    body = completion(echo=True, max_tokens=0)
    assert limits_of(body, 100).max_tokens(99) == 1
    with pytest.raises(PromptTooLong, match="requested 101 tokens"):
        limits_of(body, 100).max_tokens(100)
    with pytest.raises(InvalidParameter, match="min_tokens: 1 is more than the 0"):
        check_least(completion(echo=True, max_tokens=0, min_tokens=1), 1)
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_tokens": 0, "logprobs": 2}):
        with pytest.raises(InvalidParameter, match="only allowed when echo") as refused:
            completion(**fields)
        assert refused.value.param == "max_tokens"


def test_the_first_choice_alone_asks_about_the_prompt_and_only_if_it_is_echoed_with_logprobs() -> None:
    asked = sampling_of(completion(echo=True, logprobs=2, n=3), TOKENIZER, 7)
    assert (asked.logprobs, asked.prompt_logprobs) == (2, 2)
    assert sampling_of_choice(asked, 0).prompt_logprobs == 2
    assert (sampling_of_choice(asked, 1).logprobs, sampling_of_choice(asked, 1).prompt_logprobs) == (2, None)
    for body in (completion(echo=True), completion(logprobs=2), completion(echo=True, best_of=2), chat(logprobs=True)):
        assert sampling_of(body, TOKENIZER, 7).prompt_logprobs is None
