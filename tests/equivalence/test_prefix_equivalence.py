"""Prefix hits on the default model in float32: what is read instead of computed changes no token.

The real planner and the real ledger drive the executor; transformers' own `generate` says what is right.
"""

from collections import Counter
from collections.abc import Mapping
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
from shared.scheduling.limits import Limits
from tests.conductor import GREEDY, Conductor, Ids
from tests.equivalence.oracle import assert_equal_or_tie, reference_logits, reference_tokens
from tests.equivalence.pilot import Asked, Pilot, random_ids

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
BLOCK = 16
ANSWER = 8
NEAR = 2e-3
"""As in the executor's own tests."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(DEFAULT_MODEL, Progress())


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_folder(folder, WorkerSettings(dtype="float32", kv_tokens=16_384), Progress())


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() < NEAR)


def conductor(loaded: Loaded, *, blocks: int | None = None, depth: int = 1, budget: int = 512) -> Conductor:
    eos_ids = loaded.tokenizer.eos_ids
    return Conductor(loaded.executor, eos_ids, Limits(budget, 8), depth=depth, blocks=blocks)


def check(folder: Path, one: Conductor, asked: Mapping[str, tuple[Ids, int]]) -> None:
    """Every answer is the reference's, or a tie; at most 1 % are ties."""
    found = Counter(
        assert_equal_or_tie(folder, prompt, one.text(name), reference_tokens(folder, prompt, max_tokens))
        for name, (prompt, max_tokens) in asked.items()
    )
    assert found["tie"] <= 0.01 * len(asked)


@pytest.mark.parametrize(("length", "hit"), [(17, 16), (32, 16), (33, 32), (63, 48), (64, 48), (65, 64)])
def test_a_prompt_asked_again_and_one_with_another_tail_answer_as_cold(
    folder: Path, loaded: Loaded, length: int, hit: int
) -> None:
    one = conductor(loaded)
    prompt, tail = random_ids(length, 1), random_ids(5, 2)
    asked = {"cold": (prompt, ANSWER), "warm": (prompt, ANSWER), "other": ((*prompt[: length - 1], *tail), ANSWER)}
    for name, (ids, max_tokens) in asked.items():
        one.submit(name, ids, max_tokens)
        one.run_dry()
    assert one.starts == [("cold", 0), ("warm", hit), ("other", (length - 1) // BLOCK * BLOCK)]
    assert one.answers["warm"].cached_tokens == hit
    check(folder, one, asked)


def test_a_hit_in_chunks_smaller_than_a_block_answers_as_cold(folder: Path, loaded: Loaded) -> None:
    one = conductor(loaded, budget=9)
    prompt = random_ids(77, 3)
    asked = {"cold": (prompt, ANSWER), "warm": ((*prompt[:50], *random_ids(30, 4)), ANSWER)}
    for name, (ids, max_tokens) in asked.items():
        one.submit(name, ids, max_tokens)
        one.run_dry()
    assert one.starts[-1] == ("warm", 48)
    check(folder, one, asked)


@pytest.mark.parametrize("depth", [1, 2])
def test_two_requests_that_share_blocks_while_both_run_answer_as_alone(
    folder: Path, loaded: Loaded, depth: int
) -> None:
    one = conductor(loaded, depth=depth)
    prompt = random_ids(49, 5)
    asked = {"first": (prompt, 20), "joins": (prompt, 12), "forks": ((*prompt[:33], *random_ids(9, 6)), 12)}
    one.submit("first", prompt, 20)
    for _ in range(3):
        one.iterate()
    for name in ("joins", "forks"):
        one.submit(name, *asked[name])
    one.iterate()
    tables = [request.blocks for request in one.view.running]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert len({table[3] for table in tables if len(table) > 3}) == sum(len(table) > 3 for table in tables)
    one.run_dry()
    assert one.starts == [("first", 0), ("joins", 48), ("forks", 32)]
    check(folder, one, asked)


def test_the_next_turn_of_a_chat_reads_what_was_generated_and_answers_as_cold(folder: Path, loaded: Loaded) -> None:
    one = conductor(loaded)
    prompt = random_ids(30, 7)
    one.submit("turn 1", prompt, 24)
    one.run_dry()
    second = (*prompt, *one.text("turn 1"), *random_ids(6, 8))
    one.submit("turn 2", second, ANSWER)
    one.run_dry()
    computed = len(prompt) + len(one.text("turn 1")) - 1
    assert one.starts[-1] == ("turn 2", computed // BLOCK * BLOCK)
    assert one.starts[-1][1] > len(prompt)
    check(folder, one, {"turn 1": (prompt, 24), "turn 2": (second, ANSWER)})


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_found_again_and_resumed_answers_as_alone(folder: Path, loaded: Loaded, depth: int) -> None:
    one = conductor(loaded, blocks=7, depth=depth)
    asked = {f"r{n}": (random_ids(17 + 5 * n, 10 + n), 30) for n in range(4)}
    for name, (ids, max_tokens) in asked.items():
        one.submit(name, ids, max_tokens)
    one.run_dry()
    found_again = [name for name, start in one.starts if name in one.preempted and start]
    assert found_again
    check(folder, one, asked)


def test_t44_two_samples_of_one_prompt_share_its_full_blocks_and_answer_as_alone(loaded: Loaded) -> None:
    """Ours: nothing is copied on write, for only full blocks are shared; each sample writes a last block of its own."""
    one = conductor(loaded)
    prompt = random_ids(39, 20)
    samplings = {f"id/{n}": Sampling(temperature=1.0, seed=n) for n in range(2)}
    one.submit("id/0", prompt, 12, sampling=samplings["id/0"])
    one.iterate()
    one.submit("id/1", prompt, 12, sampling=samplings["id/1"])
    one.iterate()
    first, second = (request.blocks for request in one.view.running)
    assert first[:2] == second[:2]
    assert [one.view.pool.holders(block) for block in (*first, second[2])] == [2, 2, 1, 1]
    one.run_dry()
    for name, sampling in samplings.items():
        alone = Pilot(loaded.executor, loaded.tokenizer.eos_ids).run({"alone": Asked(prompt, 12, sampling)})["alone"]
        assert one.text(name) == alone
    assert one.text("id/0") != one.text("id/1")


def test_t35_a_position_holds_keys_and_values_alone_and_they_stay_until_its_block_is_handed_out(
    folder: Path, loaded: Loaded
) -> None:
    executor = loaded.executor
    assert isinstance(executor, TorchExecutor)
    layers, kv_heads, dim, bytes_of_float32 = 30, 3, 64, 4
    assert executor._attention.bytes_per_position() == 2 * layers * kv_heads * dim * bytes_of_float32
    one = conductor(loaded, blocks=8)
    prompt, thief = random_ids(33, 30), random_ids(120, 31)
    one.submit("ended", prompt, 4)
    one.run_dry()
    chain = one.ledger._blocks.chain("")
    chain.extend(prompt)
    assert list(one.ledger._blocks.names.values()) == chain.hashes
    reads = Row(RequestId("reads"), 32, prompt[32:], (*one.ledger._blocks.names, BlockId(900)), Draw(GREEDY, 33))
    for _ in range(2):  # reading changes nothing
        assert near(executor.logits((reads,))[0], reference_logits(folder, prompt))
    one.submit("thief", thief, 4)
    one.run_dry()
    assert set(one.ledger._blocks.names.values()).isdisjoint(chain.hashes)
    assert not near(executor.logits((reads,))[0], reference_logits(folder, prompt))
