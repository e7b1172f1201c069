"""Prompts: what they may be, how long, and how a chat becomes one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.asked import (
    Limits,
    prompt_ids_of,
)
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import VOCABULARY, fake_tokenizer_files
from shared.errors import InvalidParameter, PromptTooLong
from tests.unit.gateway_words import SERVED, TOKENIZER, chat, completion


@pytest.mark.parametrize(("asked", "prompt_tokens", "total"), [(61, 40, 101), (None, 100, 101), (1, 400, 401)])
def test_what_exceeds_the_length_served_is_refused_with_both_numbers(
    asked: int | None, prompt_tokens: int, total: int
) -> None:
    with pytest.raises(PromptTooLong, match=rf"maximum context length is 100 tokens.*requested {total} tokens"):
        Limits(asked, None, 100, "messages").max_tokens(prompt_tokens)


def test_a_prompt_is_text_or_a_list_of_ids() -> None:
    ids = (104, 105)
    for prompt in ("hi", ["hi"], [104, 105], [[104, 105]]):
        assert prompt_ids_of(completion(prompt=prompt), TOKENIZER, SERVED) == (ids,)
    assert prompt_ids_of(completion(prompt=[VOCABULARY - 1]), TOKENIZER, SERVED) == ((VOCABULARY - 1,),)


def test_several_prompts_are_texts_or_lists_of_ids_or_some_of_both() -> None:
    for prompt in (["hi", "b"], [[104, 105], [98]], ["hi", [98]]):
        assert prompt_ids_of(completion(prompt=prompt), TOKENIZER, SERVED) == ((104, 105), (98,))


@pytest.mark.parametrize("fields", [{"prompt": ["a"] * 129}, {"prompt": ["a"] * 65, "n": 2}])
def test_a_request_has_at_most_128_answers(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="at most 128 answers") as refused:
        prompt_ids_of(completion(**fields), TOKENIZER, SERVED)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        ["a", ""],
        ["a", []],
        ["a", 5],
        [5, "a"],
        [[1], ["a"]],
        [[[1]]],
        [VOCABULARY],
        [-1],
        [1.5],
        [True],
        [None],
        [2**80],
        [{}],
    ],
)
def test_any_other_prompt_is_refused_by_name(prompt: object) -> None:
    with pytest.raises(InvalidParameter) as refused:
        prompt_ids_of(completion(prompt=prompt), TOKENIZER, SERVED)
    assert refused.value.param == "prompt"


def test_a_chat_is_rendered_by_the_models_own_template() -> None:
    (token_ids,) = prompt_ids_of(chat(), TOKENIZER, SERVED)
    assert TOKENIZER.decode(token_ids) == "user: hi\nassistant: "


def test_a_template_that_refuses_a_chat_refuses_the_request() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    picky = ModelTokenizer(msgspec.structs.replace(fake_tokenizer_files(), chat_template=template))
    with pytest.raises(InvalidParameter, match="roles must alternate"):
        prompt_ids_of(chat(), picky, SERVED)


def test_a_model_without_a_template_takes_no_chats() -> None:
    plain = ModelTokenizer(msgspec.structs.replace(fake_tokenizer_files(), chat_template=None))
    with pytest.raises(InvalidParameter, match="no chat template"):
        prompt_ids_of(chat(), plain, SERVED)


def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(ModelTokenizer, "encode", never)
    for body, param in (
        (completion(prompt="x" * 50_000), "prompt"),
        (chat(messages=[{"role": "user", "content": "x" * 50_000}]), "messages"),
    ):
        with pytest.raises(PromptTooLong, match="at least") as refused:
            prompt_ids_of(body, TOKENIZER, SERVED)
        assert refused.value.param == param


@given(st.text(max_size=300))
def test_no_text_has_fewer_tokens_than_the_least(text: str) -> None:
    assert len(TOKENIZER.encode(text, is_chat=False)) >= TOKENIZER.least_tokens(text)
