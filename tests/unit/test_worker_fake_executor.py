"""The fake executor: a wrong block is a wrong token, or a failed step."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.worker.executor import LEAST, Draw, Drawn, Row, Scored, Scores
from services.worker.fake_executor import FakeExecutor, WrongBlock, fake_next_token
from services.worker.fake_tokenizer import EOS_ID, fake_tokenizer_files
from services.worker.history import History
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Logprobs, Ranked, Sampling


def row(name: str, ids: tuple[int, ...], *table: int, start: int = 0) -> Row:
    draw = Draw(Sampling(), start + len(ids))
    return Row(RequestId(name), start, ids, tuple(BlockId(block) for block in table), draw)


def test_the_next_token_is_the_hash_of_the_context_read_back_through_the_table() -> None:
    executor = FakeExecutor(8)
    prompt = tuple(range(40))
    (token,) = executor.execute((row("a", prompt, 5, 0, 3),))
    assert token == fake_next_token(prompt)
    (after,) = executor.execute((row("a", (7,), 5, 0, 3, start=40),))
    assert after == fake_next_token((*prompt, 7))


def test_chunks_and_whole_prompts_give_the_same_token() -> None:
    executor = FakeExecutor(8)
    prompt = tuple(range(40))
    executor.execute((row("a", prompt[:17], 1, 2, 3),))
    (token,) = executor.execute((row("a", prompt[17:], 1, 2, 3, start=17),))
    assert token == fake_next_token(prompt)


def test_a_table_with_swapped_blocks_is_noticed() -> None:
    executor = FakeExecutor(8)
    executor.execute((row("a", tuple(range(32)), 1, 2),))
    with pytest.raises(WrongBlock, match="position 0 reads back position 16"):
        executor.execute((row("a", (9,), 2, 1, 3, start=32),))


def test_a_block_that_somebody_else_overwrote_gives_another_token() -> None:
    executor = FakeExecutor(8)
    executor.execute((row("a", tuple(range(16)), 1),))
    executor.execute((row("thief", tuple(range(100, 116)), 1),))
    (token,) = executor.execute((row("a", (9,), 1, 2, start=16),))
    assert token != fake_next_token((*range(16), 9))


def test_a_row_reads_what_another_request_wrote_into_a_shared_block() -> None:
    executor = FakeExecutor(8)
    shared = tuple(range(32))
    executor.execute((row("a", (*shared, 1), 5, 2, 7),))
    both = (row("a", (9,), 5, 2, 7, start=33), row("b", (50, 51), 5, 2, 3, start=32))
    assert executor.execute(both) == (fake_next_token((*shared, 1, 9)), fake_next_token((*shared, 50, 51)))


def test_a_hit_with_other_tokens_at_the_same_positions_gives_another_token() -> None:
    executor = FakeExecutor(8)
    executor.execute((row("a", tuple(range(16)), 5),))
    (token,) = executor.execute((row("b", (50,), 5, 3, start=16),))
    assert token == fake_next_token((*range(16), 50))
    assert token != fake_next_token((*range(1, 17), 50))


def test_forgetting_empties_the_pool() -> None:
    executor = FakeExecutor(8)
    executor.execute((row("a", tuple(range(16)), 1),))
    executor.forget()
    with pytest.raises(WrongBlock):
        executor.execute((row("a", (9,), 1, 2, start=16),))


def test_tokens_are_printable_bytes_and_one_in_64_ends() -> None:
    counts = Counter(fake_next_token((seed, 1)) for seed in range(20_000))
    assert set(counts) <= {*range(32, 127), EOS_ID}
    assert 0.8 < counts[EOS_ID] / (20_000 / 64) < 1.2


def test_a_step_takes_as_long_as_it_is_told() -> None:
    slept_s: list[float] = []
    now_s = iter([10.0, 11.0, 20.0, 24.0])  # the first step is busy for one second, the second for four
    executor = FakeExecutor(2, step_s=3.0, clock=lambda: next(now_s), sleep=slept_s.append)
    executor.execute((row("a", (1,), 0),))
    executor.execute((row("a", (1,), 0, start=1),))
    assert slept_s == [2.0]


@given(st.text())
def test_the_byte_tokenizer_gives_back_every_text(text: str) -> None:
    tokenizer = Tokenizer.from_str(fake_tokenizer_files().tokenizer_json.decode())
    ids = tokenizer.encode(text).ids
    if "<|" not in text:
        assert ids == list(text.encode())
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [piece for token in ids if (piece := stream.step(tokenizer, token)) is not None]
    if "<|" not in text:
        assert "".join(pieces) == text


def test_the_fake_worker_starts_without_torch() -> None:
    code = (
        "import services.worker.service, services.worker.fake_executor, sys; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_it_tells_logprobs_to_who_asks_and_is_always_certain() -> None:
    executor = FakeExecutor(8)
    plain = row("a", tuple(range(5)), 1)
    (token,) = executor.execute((plain,))
    asked = replace(plain, draw=Draw(Sampling(logprobs=1), 5))
    assert isinstance(token, int)
    assert executor.execute((asked,)) == (Drawn(token, Logprobs(0.0, (Ranked(token, 0.0),))),)
    asked = replace(plain, draw=Draw(Sampling(logprobs=0), 5))
    assert executor.execute((asked,)) == (Drawn(token, Logprobs(0.0)),)


def test_no_answer_ends_before_its_least_length() -> None:
    executor = FakeExecutor(8)
    ids = next((n,) for n in range(1000) if fake_next_token((n,)) == EOS_ID)
    for output, ends in (([], False), ([5], False), ([5, 5], True)):
        history = History(output, prompt_ids=(), ending_ids={EOS_ID})
        asked = replace(row("a", ids, 1), draw=Draw(Sampling(min_tokens=2), 1, history))
        assert (executor.execute((asked,)) == (EOS_ID,)) is ends


def test_it_tells_of_a_prompt_what_it_would_have_said_itself_whoever_draws() -> None:
    executor = FakeExecutor(8)
    ids = (5, 6, fake_next_token((5, 6)), 7)
    scores = Scores(1, ids[1:], 1)
    told = tuple(
        Logprobs(0.0 if likeliest == ids[at] else LEAST, (Ranked(likeliest, 0.0),))
        for at, likeliest in ((at, fake_next_token(ids[:at])) for at in range(1, 4))
    )
    fed = replace(row("a", ids[:3], 1), draw=None, scores=scores)
    other = row("b", (9,), 2)
    assert executor.execute((fed, other)) == (Scored(told), *executor.execute((other,)))
    whole = replace(row("a", ids, 1), scores=scores)
    assert executor.execute((whole,)) == (Scored(told, fake_next_token(ids)),)
    assert told[1].logprob == 0.0
