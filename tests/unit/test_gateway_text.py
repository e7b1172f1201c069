"""Tokens to text: whole characters only, and the pieces together are what decoding all at once gives."""

import asyncio
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Sequence
from tokenizers.models import BPE

from services.gateway.answer import Answer, Wanted
from services.gateway.chats import Chat
from services.gateway.ongoing import Ongoing
from services.gateway.tokenizer import AnswerText, Detokenizer, ModelTokenizer
from services.worker.fake_tokenizer import EOS_ID, VOCABULARY, fake_tokenizer_files
from shared.ids import RequestId, WorkerId
from shared.protocol.messages import Sampling, TokenRow
from shared.runtime.settings import DEFAULT_MODEL

BYTES = ModelTokenizer(fake_tokenizer_files())
WORKER = WorkerId("w")
CUTE = "👩‍🚀🇩🇪 日本語 ﷽"


@cache
def default_model() -> ModelTokenizer:
    # imported only where the model is wanted: it takes seconds
    from services.worker.model_store import model_folder  # noqa: PLC0415 - as said
    from services.worker.progress import Progress  # noqa: PLC0415 - as said
    from services.worker.tokenizer_side import tokenizer_files  # noqa: PLC0415 - as said

    return ModelTokenizer(tokenizer_files(model_folder(DEFAULT_MODEL, Progress())))


def pieces(tokenizer: ModelTokenizer, token_ids: list[int]) -> tuple[list[str], str]:
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token_id) for token_id in token_ids], detokenizer.end()


@given(st.text(), st.integers(0, 1000))
@example(CUTE, 5)
@example("\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}a", 4)
def test_pieces_of_a_text_cut_anywhere_are_the_text_decoded_at_once(text: str, cut: int) -> None:
    token_ids = list(text.encode())
    token_ids = token_ids[: cut % (len(token_ids) + 1)]
    early, tail = pieces(BYTES, token_ids)
    assert "".join(early) + tail == BYTES.decode(token_ids)


@given(st.lists(st.integers(0, VOCABULARY - 1)))
@example([0xE6, 0x97, ord("a"), EOS_ID, 0xA5])
def test_any_tokens_at_all_read_as_when_decoded_at_once(token_ids: list[int]) -> None:
    early, tail = pieces(BYTES, token_ids)
    assert "".join(early) + tail == BYTES.decode(token_ids)


@given(st.text(st.characters(exclude_characters="\N{REPLACEMENT CHARACTER}", exclude_categories=["Cs"])))
@example(CUTE)
def test_no_piece_ends_within_a_character(text: str) -> None:
    early, tail = pieces(BYTES, list(text.encode()))
    assert "".join(early) == text, "a whole text leaves no tail"
    assert tail == ""
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in early)


@pytest.mark.model
@given(st.text(), st.integers(0, 1000))
@example(CUTE, 9)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_default_model_reads_a_text_cut_anywhere_as_when_decoded_at_once(text: str, cut: int) -> None:
    tokenizer = default_model()
    token_ids = list(tokenizer.encode(text, is_chat=False))
    token_ids = token_ids[: cut % (len(token_ids) + 1)]
    early, tail = pieces(tokenizer, token_ids)
    assert "".join(early) + tail == tokenizer.decode(token_ids)


@pytest.mark.model
def test_the_default_model_renders_a_chat_as_it_was_trained() -> None:
    rendered = default_model().render(Chat([{"role": "user", "content": "hi"}]))
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_bad_byte_that_changes_what_was_shown_does_not_break_a_stream_with_byte_fallback() -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"word": 256}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = Sequence([ByteFallback(), Fuse()])
    detokenizer = Detokenizer(tokenizer, {})
    shown = [detokenizer.push(token_id) for token_id in (ord("a"), 0xE6, 256, 256)]
    assert "".join(shown) == "a\N{REPLACEMENT CHARACTER}wordword"
    assert detokenizer.end() == ""


def ongoing(*stops: str, max_tokens: int = 100) -> Ongoing:
    wanted = Wanted(RequestId("r"), (1,), max_tokens, Sampling(), ignore_eos=False, eos_ids=BYTES.eos_ids)
    return Ongoing(Answer(wanted), AnswerText(BYTES.detokenizer(), stops), started_s=0.0)


def row(first_index: int, data: bytes | list[int], finish: str | None = None) -> TokenRow:
    return TokenRow(RequestId("r"), 1, first_index, tuple(data), finish)  # type: ignore[arg-type]  # a literal's text


async def test_news_merge_while_nobody_reads() -> None:
    one = ongoing()
    for index, byte in enumerate(b"hello"):
        one.hear(WORKER, row(index, [byte]), now_s=float(index))
    news = await one.news()
    assert (news.text, news.completion_tokens, news.is_last) == ("hello", 5, False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await one.news()
    assert one.first_token_s == 0.0


async def test_the_end_of_turn_is_counted_and_never_shown() -> None:
    one = ongoing()
    one.hear(WORKER, row(0, [*b"hi", EOS_ID], "stop"), 0.0)
    news = await one.news()
    assert (news.text, news.completion_tokens, news.finish) == ("hi", 3, "stop")


async def test_an_ordinary_token_can_be_the_end_of_turn() -> None:
    wanted = Wanted(RequestId("r"), (1,), 9, Sampling(), ignore_eos=False, eos_ids=frozenset({ord("!")}))
    one = Ongoing(Answer(wanted), AnswerText(BYTES.detokenizer(), ()), started_s=0.0)
    one.hear(WORKER, row(0, b"hi!", "stop"), 0.0)
    assert (await one.news()).text == "hi"


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it() -> None:
    one = ongoing("END")
    one.hear(WORKER, row(0, b"so E"), 0.0)
    assert (await one.news()).text == "so "
    one.hear(WORKER, row(4, b"NDless"), 0.0)
    news = await one.news()
    assert (news.text, news.completion_tokens, news.finish) == ("", 6, "stop")


async def test_what_was_held_back_for_a_stop_string_comes_at_the_end() -> None:
    one = ongoing("END")
    one.hear(WORKER, row(0, b"so EN", "length"), 0.0)
    news = await one.news()
    assert (news.text, news.finish) == ("so EN", "length")


async def test_a_character_cut_off_by_the_length_reads_as_the_replacement_character() -> None:
    one = ongoing()
    one.hear(WORKER, row(0, "日".encode()[:2], "length"), 0.0)
    assert (await one.news()).text == "\N{REPLACEMENT CHARACTER}"


async def test_a_failure_in_the_worker_is_an_error() -> None:
    one = ongoing()
    one.hear(WORKER, row(0, b"", "error"), 0.0)
    news = await one.news()
    assert news.finish is None
    assert "failed in the worker" in str(news.error)


async def test_a_stop_string_does_not_end_an_answer_before_min_tokens() -> None:
    wanted = Wanted(RequestId("r"), (1,), 100, Sampling(min_tokens=4), ignore_eos=False, eos_ids=BYTES.eos_ids)
    one = Ongoing(Answer(wanted), AnswerText(BYTES.detokenizer(), ["b"], min_tokens=4), started_s=0.0)
    one.hear(WORKER, row(0, b"abab"), 0.0)
    assert (await one.news()).text == "abab"
    one.hear(WORKER, row(4, b"ab"), 0.0)
    news = await one.news()
    assert (news.text, news.completion_tokens, news.finish) == ("a", 6, "stop")


async def test_a_stop_token_is_counted_and_never_shown_even_if_the_models_own_are_ignored() -> None:
    asked = Sampling(stop_token_ids=(ord("!"),))
    wanted = Wanted(RequestId("r"), (1,), 9, asked, ignore_eos=True, eos_ids=BYTES.eos_ids)
    one = Ongoing(Answer(wanted), AnswerText(BYTES.detokenizer(), ()), started_s=0.0)
    one.hear(WORKER, row(0, b"hi!", "stop"), 0.0)
    news = await one.news()
    assert (news.text, news.completion_tokens, news.finish) == ("hi", 3, "stop")
    assert one.answer.complete() == "stop"
