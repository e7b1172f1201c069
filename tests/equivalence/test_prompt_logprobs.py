"""What is told of a prompt's tokens, against plain transformers' log_softmax in float32: all of it, once, to everyone.

The real planner and the real ledger drive small models of several families, by their own code and as a program.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from services.worker.executor import Draw, DrawFailed, Row, Scored, Scores
from services.worker.loading import fitted, servable_class
from services.worker.program_adoption import adopt_now
from services.worker.program_building import Wish
from services.worker.sampling_logprobs import logprobs_of
from services.worker.torch_executor import TorchExecutor
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Logprobs, Sampling
from shared.runtime.settings import WorkerSettings
from shared.scheduling.limits import Limits
from tests.attention_paths import path_of
from tests.conductor import GREEDY, Conductor, Ids
from tests.small_models import SMALL

VOCABULARY: int = SMALL["vocab_size"]
FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    # changes its logits behind the last product
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=5.0, sliding_window=8),
    # torch computes a part of it between the kernel's calls
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
}
NEAR = 5e-4
"""Sums in another order differ by so much in a logprob of these models."""
LENGTHS = (1, 2, 17, 70, 150)
LIMITS = Limits(90, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path_of("kernel")  # before the cache is elsewhere: it is compiled once
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(1)
    model = servable_class(config)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    model.train(mode=False)
    return model


def executor_of(family: str, how: str) -> TorchExecutor:
    serving = fitted(model_of(FAMILIES[family]()), WorkerSettings(kv_tokens=1024), path_of("kernel"))
    if how == "program":
        adopt_now(serving, Wish("model", serving.executor.size.max_model_len, serving.executor.vocabulary))
        assert serving.executor.has_program
    return serving.executor


def prompt(length: int, seed: int = 0) -> Ids:
    return tuple((31 * index * index + 7 * index + 11 * seed + 3) % (VOCABULARY - 3) + 3 for index in range(length))


def reference(family: str, ids: Ids) -> torch.Tensor:
    """Return what plain transformers says of each token's follower: ``[tokens, vocabulary]`` logprobs."""
    with torch.inference_mode():
        return torch.log_softmax(model_of(FAMILIES[family]())(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)


def check(family: str, ids: Ids, told: list[Logprobs], most: int) -> None:
    assert len(told) == len(ids) - 1
    expected = reference(family, ids)
    for place, one in enumerate(told, start=1):
        row = expected[place - 1]
        assert one.logprob == pytest.approx(float(row[ids[place]]), abs=NEAR)
        assert [ranked.logprob for ranked in one.top] == pytest.approx(row.topk(most).values.tolist(), abs=NEAR)
        for ranked in one.top:
            assert ranked.logprob == pytest.approx(float(row[ranked.token_id]), abs=NEAR)


def asking(most: int, **fields: Any) -> Sampling:
    return Sampling(temperature=0.0, prompt_logprobs=most, **fields)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["model", "program"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_chunks_among_others_are_told_as_plain_transformers_says(family: str, how: str) -> None:
    conductor = Conductor(executor_of(family, how), (), LIMITS, depth=2)
    for length in LENGTHS:
        conductor.submit(f"told {length}", prompt(length), 4, sampling=asking(length % 6, logprobs=1))
        conductor.submit(f"other {length}", prompt(length, 1), 4)
    conductor.run_dry()
    for length in LENGTHS:
        check(family, prompt(length), conductor.answers[f"told {length}"].of_prompt, length % 6)
        assert conductor.answers[f"other {length}"].of_prompt == []


@pytest.mark.parametrize("how", ["model", "program"])
def test_no_more_rows_than_stated_go_through_the_head_at_a_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(*args: Any) -> list[Logprobs]:
        seen.append(len(args[1]))
        return logprobs_of(*args)

    monkeypatch.setattr("services.worker.prompt_scores.logprobs_of", counted)
    conductor = Conductor(executor_of("llama", how), (), Limits(256, 8))
    conductor.submit("told", prompt(200), 1, sampling=asking(2))
    conductor.run_dry()
    assert seen == [64, 64, 64, 7]
    check("llama", prompt(200), conductor.answers["told"].of_prompt, 2)


@pytest.mark.parametrize("how", ["model", "program"])
def test_others_in_the_batch_come_out_the_same_to_the_last_bit(how: str) -> None:
    executor = executor_of("llama", how)
    ids = [prompt(40, seed) for seed in range(3)]

    def row(index: int, scores: Scores | None = None) -> Row:
        draw = Draw(Sampling(temperature=0.0, logprobs=20), 40)
        return Row(
            RequestId(str(index)),
            0,
            ids[index],
            tuple(map(BlockId, range(3 * index, 3 * index + 3))),
            draw,
            scores=scores,
        )

    plain = executor.execute((row(0), row(1), row(2)))
    among = executor.execute((row(0), row(1, Scores(1, ids[1][1:], 5)), row(2)))
    assert isinstance(among[1], Scored)
    assert (among[0], among[1].drawn, among[2]) == plain


def test_all_of_a_prompt_is_computed_though_it_is_cached_and_others_find_it_afterwards() -> None:
    conductor = Conductor(executor_of("llama", "model"), (), LIMITS)
    for name, sampling in (("warms", GREEDY), ("told", asking(1)), ("finds", GREEDY)):
        conductor.submit(name, prompt(70), 3, sampling=sampling)
        conductor.run_dry()
    assert conductor.starts == [("warms", 0), ("told", 0), ("finds", 64)]
    check("llama", prompt(70), conductor.answers["told"].of_prompt, 1)
    assert conductor.text("told") == conductor.text("finds") == conductor.text("warms")
    assert (conductor.planner.state.prefix_queries, conductor.planner.state.prefix_hits) == (140, 64)


def test_a_preempted_prompt_is_told_once() -> None:
    conductor = Conductor(executor_of("llama", "model"), (), Limits(20, 4), blocks=11, depth=2)
    conductor.submit("first", prompt(60, 3), 100)
    conductor.submit("told", prompt(100), 20, sampling=asking(2))
    conductor.run_dry()
    assert "told" in conductor.preempted
    assert conductor.answers["told"].told_again > 0, "it was in the middle of its prompt"
    check("llama", prompt(100), conductor.answers["told"].of_prompt, 2)


def test_who_is_preempted_behind_its_prompt_is_not_told_of_it_again_and_may_find_it_cached() -> None:
    conductor = Conductor(executor_of("llama", "model"), (), Limits(64, 4), blocks=9)
    conductor.submit("first", prompt(60, 3), 60)
    conductor.submit("told", prompt(49), 60, sampling=asking(2))
    conductor.run_dry()
    assert "told" in conductor.preempted
    assert conductor.answers["told"].told_again == 0
    assert next(start for name, start in conductor.starts if name == "told") == 0
    check("llama", prompt(49), conductor.answers["told"].of_prompt, 2)


def test_a_new_leader_goes_on_with_a_prompt_that_is_half_told() -> None:
    conductor = Conductor(executor_of("llama", "model"), (), Limits(30, 4))
    conductor.submit("told", prompt(100), 2, sampling=asking(3))
    for _ in range(2):
        conductor.iterate()
    assert len(conductor.answers["told"].of_prompt) == 60
    conductor.claim()
    conductor.run_dry()
    assert conductor.answers["told"].told_again == 0
    check("llama", prompt(100), conductor.answers["told"].of_prompt, 3)


@pytest.mark.parametrize("how", ["model", "program"])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(how: str) -> None:
    model = model_of(FAMILIES["llama"]())
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    serving = fitted(model, WorkerSettings(kv_tokens=1024), path_of("kernel"))
    if how == "program":
        adopt_now(serving, Wish("model", serving.executor.size.max_model_len, serving.executor.vocabulary))
    good, bad = (5, 6, 7, 8), (5, 50, 7, 8)

    def row(index: int, ids: Ids) -> Row:
        return Row(RequestId(str(index)), 0, ids, (BlockId(index),), None, scores=Scores(1, ids[1:], 0))

    told, failed = serving.executor.execute((row(0, good), row(1, bad)))
    assert isinstance(told, Scored)
    assert isinstance(failed, DrawFailed)
