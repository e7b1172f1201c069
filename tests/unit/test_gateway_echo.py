"""What an answer repeats of its prompt, and where the prompt's tokens begin in it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from services.gateway.asked import prompt_ids_of
from services.gateway.bodies import CompletionBody, read_body
from services.gateway.echo import MAX_TOLD, EchoText, echo_texts, echoes_of
from services.gateway.tokenizer import ModelTokenizer
from services.worker.fake_tokenizer import EOS_ID, fake_tokenizer_files
from shared.errors import InvalidParameter

TOKENIZER = ModelTokenizer(fake_tokenizer_files())
BOS_ID = EOS_ID + 1
SERVED = 10_000


def echoed(tokenizer: ModelTokenizer = TOKENIZER, **fields: Any) -> list[EchoText]:
    asked = {"model": "m", "echo": True, "logprobs": 0, **fields}
    body = read_body(CompletionBody, msgspec.json.encode(asked))
    return list(echo_texts(body, prompt_ids_of(body, tokenizer, SERVED), tokenizer))


def putting_bos_first() -> ModelTokenizer:
    files = fake_tokenizer_files()
    tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", BOS_ID)])
    return ModelTokenizer(msgspec.structs.replace(files, tokenizer_json=tokenizer.to_str().encode()))


def test_a_text_is_repeated_as_it_is_and_token_ids_as_they_read() -> None:
    assert echoed(prompt="hi") == echoed(prompt=[104, 105]) == [EchoText("hi", (0, 1))]
    assert echoed(prompt=["a", "né"]) == [EchoText("a", (0,)), EchoText("né", (0, 1, 1))]
    assert echoed(prompt=[[97], [BOS_ID, 98]]) == [EchoText("a", (0,)), EchoText("<|begin|>b", (0, 9))]
    assert echoed(prompt="hi", logprobs=None) == [EchoText("hi")]


def test_what_is_not_to_be_repeated_is_not_read_again() -> None:
    body = read_body(CompletionBody, b'{"model": "m", "prompt": "hi", "logprobs": 2}')
    assert echoes_of(body, ((104, 105),), TOKENIZER) == [None]


def test_a_special_token_takes_its_place_if_it_is_in_the_text_and_none_if_the_tokenizer_puts_it_there() -> None:
    assert echoed(prompt="a<|end|>b") == [EchoText("a<|end|>b", (0, 1, 8))]
    assert echoed(putting_bos_first(), prompt="ab") == [EchoText("ab", (0, 0, 1))]
    assert echoed(putting_bos_first(), prompt="<|begin|>b") == [EchoText("<|begin|>b", (0, 9, 9))]


def test_a_cut_off_character_is_shown_as_one() -> None:
    (one,) = echoed(prompt=[97, 0xC3])
    assert one == EchoText("a\N{REPLACEMENT CHARACTER}", (0, 1))


@given(st.lists(st.integers(0, BOS_ID), min_size=1, max_size=30))
def test_offsets_never_go_back_nor_beyond_the_text(token_ids: list[int]) -> None:
    (one,) = echoed(prompt=token_ids)
    assert len(one.offsets) == len(token_ids)
    assert list(one.offsets) == sorted(one.offsets)
    assert 0 == one.offsets[0] <= one.offsets[-1] <= len(one.text)


def test_a_request_is_told_of_so_many_tokens_of_prompts_and_no_more() -> None:
    prompt = [97] * 1024
    assert MAX_TOLD == 64 * 1024
    assert len(echoed(prompt=prompt, n=64)) == 1
    assert len(echoed(prompt=[prompt] * 2, n=32)) == 2
    assert len(echoed(prompt=prompt, n=128, logprobs=None)) == 1
    for prompts, n in (([prompt], 65), ([prompt] * 2, 33)):
        with pytest.raises(InvalidParameter, match="at most 65536 tokens") as refused:
            echoed(prompt=prompts, n=n)
        assert refused.value.param == "echo"
