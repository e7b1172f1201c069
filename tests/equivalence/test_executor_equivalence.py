"""The executor on the default model in float32 against transformers' own `generate`, by hand-made plans."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from services.worker.executor import Draw, Loaded, Row
from services.worker.loading import load_folder
from services.worker.model_store import model_folder
from services.worker.progress import Progress
from services.worker.torch_executor import TorchExecutor
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Sampling
from shared.runtime.settings import DEFAULT_MODEL, WorkerSettings
from tests.attention_paths import PATHS, path_of
from tests.equivalence.oracle import assert_equal_or_tie, reference_logits, reference_tokens
from tests.equivalence.pilot import Asked, Ids, Pilot

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 64, 100, 257, 400, 600)
NEAR = 2e-3
"""Logits of this model lie between -20 and 30; sums in another order differ in the fifth digit."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(DEFAULT_MODEL, Progress())


@pytest.fixture(scope="module", params=PATHS)
def loaded(folder: Path, request: pytest.FixtureRequest) -> Loaded:
    settings = WorkerSettings(dtype="float32", kv_tokens=16_384)
    return load_folder(folder, settings, Progress(), path=path_of(request.param))


@pytest.fixture(scope="module")
def executor(loaded: Loaded) -> TorchExecutor:
    assert isinstance(loaded.executor, TorchExecutor)
    return loaded.executor


def prompt(length: int, seed: int = 0) -> Ids:
    numbers = random.Random(length * 1000 + seed)
    return tuple(numbers.randrange(3, 49_152) for _ in range(length))


def row(name: str, ids: Ids, *table: int, start: int = 0) -> Row:
    draw = Draw(Sampling(temperature=0.0), start + len(ids))
    return Row(RequestId(name), start, ids, tuple(BlockId(block) for block in table), draw)


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() < NEAR)


@pytest.mark.parametrize("chunk", [16, 512])
def test_greedy_tokens_equal_generate_with_requests_joining_and_leaving(
    folder: Path, loaded: Loaded, chunk: int
) -> None:
    asked = {
        f"r{length}": Asked(prompt(length), max_tokens=5 + at % 4, joins_at=at) for at, length in enumerate(LENGTHS)
    }
    answers = Pilot(loaded.executor, loaded.tokenizer.eos_ids, chunk=chunk).run(asked)
    found: Counter[str] = Counter()
    for name, one in asked.items():
        expected = reference_tokens(folder, one.prompt, one.max_tokens)
        found[assert_equal_or_tie(folder, one.prompt, answers[name], expected)] += 1
    assert found["tie"] <= 0.01 * len(asked)


def test_t30_two_increments_and_two_prompts_in_one_batch_of_seven_rows_equal_separate_runs(
    folder: Path, executor: TorchExecutor
) -> None:
    first, second, third, fourth = prompt(9, 1), prompt(20, 2), prompt(2, 3), prompt(3, 4)
    executor.logits((row("x1", first[:-1], 40), row("x2", second[:-1], 7, 3)))
    batch = (
        row("x1", first[-1:], 40, start=8),
        row("x2", second[-1:], 7, 3, start=19),
        row("x3", third, 12),
        row("x4", fourth, 5),
    )
    assert sum(len(one.token_ids) for one in batch) == 7
    merged = executor.logits(batch)
    for got, ids in zip(merged, (first, second, third, fourth), strict=True):
        assert near(got, reference_logits(folder, ids))


PAIRS = {
    "two initiations of different lengths": (0, 0, 5, 11),
    "two increments at different positions": (5, 11, 1, 1),
    "one of each": (5, 0, 1, 7),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_t31_pairs_that_canonical_batching_cannot_join_equal_separate_runs(
    folder: Path, executor: TorchExecutor, pair: tuple[int, int, int, int]
) -> None:
    start_a, start_b, count_a, count_b = pair
    a, b = prompt(start_a + count_a, 5), prompt(start_b + count_b, 6)
    if start_a:
        executor.logits((row("a", a[:start_a], 9),))
    if start_b:
        executor.logits((row("b", b[:start_b], 30),))
    both = executor.logits((row("a", a[start_a:], 9, start=start_a), row("b", b[start_b:], 30, start=start_b)))
    assert near(both[0], reference_logits(folder, a))
    assert near(both[1], reference_logits(folder, b))


def test_t38_a_prompt_in_chunks_of_16_comes_out_as_in_one_shot(folder: Path, executor: TorchExecutor) -> None:
    ids = prompt(75, 7)
    whole = executor.logits((row("whole", ids, 1, 2, 3, 4, 5),))[0]
    chunked = whole
    for start in range(0, 75, 16):
        chunked = executor.logits((row("cut", ids[start : start + 16], 20, 11, 31, 6, 15, start=start),))[0]
        assert near(chunked, reference_logits(folder, ids[: start + 16]))
    assert near(chunked, whole)


def test_t39_changing_one_prompt_leaves_the_others_as_they_are(executor: TorchExecutor) -> None:
    a, b, c, other = prompt(5, 8), prompt(13, 9), prompt(8, 10), prompt(13, 11)
    before = executor.logits((row("a", a, 0), row("b", b, 1), row("c", c, 2)))
    after = executor.logits((row("a", a, 0), row("b", other, 1), row("c", c, 2)))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not near(before[1], after[1])


def test_sampling_repeats_per_seed_and_position_whatever_the_batch(loaded: Loaded) -> None:
    warm = Sampling(temperature=0.8, top_p=0.95, seed=1234)
    mine = Asked(prompt(20, 12), max_tokens=12, sampling=warm, ignore_eos=True)
    crowd = {
        f"o{n}": Asked(prompt(9 + n, 13), max_tokens=9, sampling=Sampling(seed=n), joins_at=n % 3) for n in range(5)
    }
    alone = Pilot(loaded.executor, loaded.tokenizer.eos_ids).run({"mine": mine})["mine"]
    among = Pilot(loaded.executor, loaded.tokenizer.eos_ids, chunk=7).run({**crowd, "mine": mine})["mine"]
    other_seed = Asked(mine.prompt, 12, Sampling(temperature=0.8, top_p=0.95, seed=4321), ignore_eos=True)
    assert alone == among
    assert alone != Pilot(loaded.executor, loaded.tokenizer.eos_ids).run({"mine": other_seed})["mine"]


def test_the_chat_template_s_end_of_turn_token_ends_answers(loaded: Loaded) -> None:
    files = loaded.tokenizer
    assert files.special_tokens.get("eos_token") == "<|im_end|>"
    assert files.eos_ids == (2,)
    assert files.chat_template is not None
