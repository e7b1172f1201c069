"""A model's program: what it says, where its values lie, and what is kept of it for the next start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedConfig, PreTrainedModel

from services.worker.attention_torch import TorchPath
from services.worker.executor import Draw, Row
from services.worker.loading import fitted, servable_class
from services.worker.probe import Probe
from services.worker.program import first_wanted
from services.worker.program_adoption import Serving, adopt_kept, adopt_later, adopt_now
from services.worker.program_building import Source, Wish
from services.worker.program_graph import NotLowered
from services.worker.program_lowering import Added, Instruction, Lowered, Place, Value, values_of
from services.worker.program_memory import lay_out
from shared.errors import StartupError
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Sampling
from shared.runtime.settings import WorkerSettings
from tests.attention_paths import path_of
from tests.small_models import SMALL

SETTINGS = WorkerSettings(kv_tokens=1024)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path_of("kernel")  # before the cache is elsewhere: it is compiled once
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))


def llama(**given: Any) -> PreTrainedConfig:
    return transformers.LlamaConfig(**{**SMALL, **given})


def model_of(config: PreTrainedConfig, dtype: torch.dtype, *, seed: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = servable_class(config)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    module: torch.nn.Module = model
    module.to(dtype)
    return model


def serving_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, *, seed: int = 1) -> Serving:
    return fitted(model_of(config, dtype, seed=seed), SETTINGS, path_of("kernel"))


def wish_of(serving: Serving, weights: str = "model") -> Wish:
    return Wish(weights, serving.executor.size.max_model_len, serving.executor.vocabulary)


def row(name: str, count: int, *table: int, start: int = 0) -> Row:
    ids = tuple((7 * index + 3 * len(name) + ord(name[0])) % 97 for index in range(start, start + count))
    return Row(RequestId(name), start, ids, tuple(map(BlockId, table)), Draw(Sampling(), start + count))


def said(logs: list[Any]) -> list[Any]:
    return [one for one in logs if one["event"] == "step_program"]


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**SMALL),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL),
    "persimmon": lambda: transformers.PersimmonConfig(**SMALL),  # torch reads a product long after it was made
}


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_program_in_bfloat16_is_as_near_to_exact_numbers_as_the_model_in_bfloat16(
    make: Callable[[], PreTrainedConfig],
) -> None:
    batch = (row("a", 19, 9, 2), row("b", 40, 30, 7, 5))
    exact = serving_of(make()).executor.logits(batch)
    serving = serving_of(make(), torch.bfloat16)
    plain = serving.executor.logits(batch).float()
    adopt_now(serving, wish_of(serving))
    assert serving.executor.has_program
    ours = serving.executor.logits(batch)
    assert (ours - exact).pow(2).mean().sqrt() <= 1.2 * (plain - exact).pow(2).mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_comes_out_the_same_to_the_last_bit_whoever_else_is_in_the_batch(dtype: torch.dtype) -> None:
    serving = serving_of(llama(), dtype)
    adopt_now(serving, wish_of(serving))
    one = row("a", 19, 9, 2)
    alone = serving.executor.logits((one,)).clone()
    others = [row("x" * count, count, 10 + count) for count in range(1, 16)]
    for batch in ((one, *others), (*others, one), (*others[:3], one, *others[3:])):
        assert torch.equal(serving.executor.logits(batch)[batch.index(one)], alone[0])


def test_a_step_of_a_usual_model_is_one_call() -> None:
    serving = serving_of(llama())
    with structlog.testing.capture_logs() as logs:
        adopt_now(serving, wish_of(serving))
    (told,) = said(logs)
    assert (told["state"], told["torch_calls"], told["how"]) == ("on", 0, "made")


def test_the_next_start_finds_the_program_and_says_the_same() -> None:
    first, second = serving_of(llama()), serving_of(llama())
    adopt_now(first, wish_of(first))
    with structlog.testing.capture_logs() as logs:
        assert adopt_kept(second, wish_of(second))
    (told,) = said(logs)
    assert (told["state"], told["how"]) == ("on", "found in the cache")
    batch = (row("a", 19, 9, 2), row("b", 40, 30, 7, 5))
    assert torch.equal(first.executor.logits(batch), second.executor.logits(batch))


def test_another_model_of_the_same_shape_does_not_find_it() -> None:
    first, other = serving_of(llama()), serving_of(llama(), seed=2)
    adopt_now(first, wish_of(first))
    assert not adopt_kept(other, wish_of(other))


@pytest.mark.parametrize("name", ["program.json", "tensors.safetensors"])
def test_a_spoilt_program_is_made_anew(tmp_path: Path, name: str) -> None:
    first, second = serving_of(llama()), serving_of(llama())
    adopt_now(first, wish_of(first))
    (file,) = tmp_path.rglob(name)
    file.write_bytes(file.read_bytes()[:-1])
    assert not adopt_kept(second, wish_of(second))
    adopt_now(second, wish_of(second))
    assert second.executor.has_program


def test_a_program_that_says_something_else_does_not_take_over(tmp_path: Path) -> None:
    serving = serving_of(llama())
    take_over = adopt_later(serving, wish_of(serving))
    with torch.no_grad():
        serving.model.model.layers[0].mlp.down_proj.weight.mul_(3)  # packed before: the program has the old ones
    with structlog.testing.capture_logs() as logs:
        take_over()
    (told,) = said(logs)
    assert (told["state"], told["why"]) == ("off", "it does not say what the model says")
    assert not serving.executor.has_program
    serving.executor.logits((row("a", 19, 9, 2),))  # and the model goes on
    assert list(tmp_path.rglob("program.json")) == []  # the next start is not to trust it


@pytest.mark.parametrize("error", [RuntimeError("no memory"), NotLowered("its graph is strange")])
def test_a_model_whose_program_cannot_be_built_serves_without_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: Source) -> None:
        raise error

    monkeypatch.setattr(Source, "made", fail)
    serving = serving_of(llama())
    with structlog.testing.capture_logs() as logs:
        adopt_now(serving, wish_of(serving))
    assert [told["state"] for told in said(logs)] == ["off"]
    assert not serving.executor.has_program
    serving.executor.logits((row("a", 19, 9, 2),))


def test_without_a_kernel_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "__init__", None)  # whoever calls it fails
    serving = fitted(model_of(llama(), torch.float32), SETTINGS, TorchPath())
    with structlog.testing.capture_logs() as logs:
        assert not adopt_kept(serving, wish_of(serving))
        adopt_later(serving, wish_of(serving))()
    (told,) = said(logs)
    assert (told["state"], told["why"]) == ("off", "there is no kernel")


def test_int8_that_says_something_else_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "agrees", lambda *_, **__: False)
    serving = serving_of(llama(), torch.bfloat16)
    with pytest.raises(StartupError, match="int8 need the step program"):
        adopt_now(serving, wish_of(serving, "int8"))


def test_the_model_lets_go_of_its_weights() -> None:
    serving = serving_of(llama())
    adopt_now(serving, wish_of(serving))
    assert sum(weight.numel() for weight in serving.model.parameters()) == 0


def test_int8_needs_a_model_in_bfloat16() -> None:
    serving = serving_of(llama(), torch.float32)
    with pytest.raises(StartupError, match="int8 need the step program"):
        adopt_now(serving, wish_of(serving, "int8"))


def test_int8_is_near_to_bfloat16() -> None:
    batch = (row("a", 19, 9, 2), row("b", 40, 30, 7, 5))
    exact = serving_of(llama()).executor.logits(batch)
    serving = serving_of(llama(), torch.bfloat16)
    adopt_now(serving, wish_of(serving, "int8"))
    error = (serving.executor.logits(batch) - exact).pow(2).mean().sqrt()
    assert error <= 0.05 * exact.pow(2).mean().sqrt()


@pytest.mark.parametrize(
    ("outs", "first"), [("tttw", 3), ("ttww", 2), ("ttt", 3), ("ww", 0), ("twtw", 0), ("wwt", 0)], ids=str
)
def test_for_other_places_only_what_depends_on_them_runs_again_or_all_if_rows_of_tokens_follow(
    outs: str, first: int
) -> None:
    places = [Place(Value(8, wanted=out == "w"), 0, 8) for out in outs]
    program = Lowered(None, torch.float32)
    program.steps = [Instruction(Added(), (place, place), place) for place in places]
    assert first_wanted(program) == first


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=30))
def test_values_that_are_needed_at_the_same_time_lie_apart(steps: list[tuple[int, int, int]]) -> None:
    values = [Value(7 * (index + 1), wanted=index % 3 == 0) for index in range(10)]
    places = [Place(value, 0, value.width) for value in values]
    program = Lowered(None, torch.float32)
    program.steps = [Instruction(Added(), (places[a], places[b]), places[out]) for a, b, out in steps]
    sizes = lay_out(program, 4)
    spans: dict[Value, list[int]] = {}
    for at, step in enumerate(program.steps):
        for value in values_of(step):
            spans.setdefault(value, []).append(at)
    for one, span in spans.items():
        assert one.at % 64 == 0
        assert one.at + one.width * 4 <= sizes[one.wanted]
        for other, others in spans.items():
            together = min(span) <= max(others) and min(others) <= max(span)
            if other is not one and other.wanted == one.wanted and together:
                assert one.at + one.width * 4 <= other.at or other.at + other.width * 4 <= one.at
