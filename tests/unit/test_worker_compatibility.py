"""Small models with random weights: served ones say what plain transformers says, others are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from services.worker.attention_torch import TorchPath
from services.worker.executor import Draw, Row
from services.worker.loading import fitted, servable_class
from services.worker.probe import Probe
from services.worker.program_adoption import adopt_now
from services.worker.program_building import Wish
from services.worker.torch_executor import TorchExecutor
from shared.errors import StartupError
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Sampling
from shared.runtime.settings import WorkerSettings
from tests import small_models
from tests.attention_paths import PATHS, path_of

SMALL = {**small_models.SMALL, "hidden_size": 32, "intermediate_size": 48}
SETTINGS = WorkerSettings(dtype="float32", kv_tokens=1024)
WINDOW = 6


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(1)
    model = servable_class(config)(config)
    model.train(mode=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)  # the usual 0.02 leaves attention nearly flat: mistakes would not show
    return model


def llama(**given: Any) -> PreTrainedConfig:
    return transformers.LlamaConfig(**{**SMALL, **given})


SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": llama,
    "llama, all heads their own": lambda: llama(num_key_value_heads=4),
    "llama, llama3 rotary": lambda: llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "mistral with a sliding window": lambda: transformers.MistralConfig(**SMALL, sliding_window=WINDOW),
    "gemma2 with softcap and windows": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
    ),
    "gemma3 with two kinds of rotary": lambda: transformers.Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixtral with experts": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "mixtral with experts and a sliding window": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, sliding_window=WINDOW
    ),
    "starcoder2 with a sliding window": lambda: transformers.Starcoder2Config(**SMALL, sliding_window=WINDOW),
    "phi3 with a sliding window": lambda: transformers.Phi3Config(**SMALL, sliding_window=WINDOW),
    "phimoe without a window": lambda: transformers.PhimoeConfig(**SMALL, num_local_experts=4),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_positions=256, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
}


def row(name: str, ids: list[int], start: int, end: int, *table: int) -> Row:
    blocks = tuple(BlockId(block) for block in table)
    return Row(RequestId(name), start, tuple(ids[start:end]), blocks, Draw(Sampling(), end))


@torch.inference_mode()
def plain(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return logits[0, -1]


@pytest.mark.parametrize("way", [*PATHS, "program"])
@pytest.mark.parametrize("make", SERVED.values(), ids=SERVED.keys())
def test_a_served_model_says_what_plain_transformers_says(make: Callable[[], PreTrainedConfig], way: str) -> None:
    config = make()
    config._attn_implementation = "eager"
    reference = model_of(config)
    serving = fitted(model_of(make()), SETTINGS, path_of("torch" if way == "torch" else "kernel"))
    executor = serving.executor
    if way == "program":
        adopt_now(serving, Wish("model", executor.size.max_model_len, executor.vocabulary))
        assert executor.has_program
    numbers = torch.Generator().manual_seed(3)
    a = torch.randint(3, 97, (41,), generator=numbers).tolist()
    b = torch.randint(3, 97, (23,), generator=numbers).tolist()
    # prompts in chunks, beside each other's decodes, through tables in no order
    executor.logits((row("a", a, 0, 19, 9, 2), row("b", b, 0, 5, 30)))
    executor.logits((row("b", b, 5, 22, 30, 4), row("a", a, 19, 40, 9, 2, 17)))
    got = executor.logits((row("a", a, 40, 41, 9, 2, 17), row("b", b, 22, 23, 30, 4)))
    for logits, ids in zip(got, (a, b), strict=True):
        assert torch.allclose(logits, plain(reference, ids), atol=2e-4, rtol=1e-4)


def jamba() -> PreTrainedConfig:
    return transformers.JambaConfig(**{**SMALL, "num_hidden_layers": 4}, use_mamba_kernels=False)


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "lfm2": (
        lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
        "models of type lfm2 cannot be served: conv layers",
    ),
    "bloom": (lambda: transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "bloom.*ALiBi"),
    "falcon": (lambda: transformers.FalconConfig(**SMALL, alibi=True), "falcon.*ALiBi"),
    "mamba": (lambda: transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2), "mamba cannot"),
    "jamba": (jamba, "jamba.*(mamba|linear attention)"),
    "qwen3-next": (lambda: transformers.Qwen3NextConfig(**SMALL), "qwen3_next.*linear attention layers"),
    "recurrent gemma": (lambda: transformers.RecurrentGemmaConfig(**SMALL), "recurrent_gemma cannot"),
    "longrope": (
        lambda: transformers.Phi3Config(
            **{**SMALL, "original_max_position_embeddings": 128},
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 128,
            },
        ),
        "phi3.*rotary positions of type longrope",
    ),
    "dynamic rotary": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "llama.*rotary positions of type dynamic",
    ),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(**SMALL, layer_types=["chunked_attention", "full_attention"]),
        "llama4_text.*chunked attention",
    ),
    "sinks": (
        lambda: transformers.GptOssConfig(
            **SMALL, head_dim=8, num_local_experts=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        ),
        "gpt_oss.*s_aux",
    ),
    # longer than the probe's rows, which therefore come out right
    "a window in the mask alone": (
        lambda: transformers.PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=12),
        "phimoe.*does not name its sliding windows",
    ),
    "latent attention": (lambda: transformers.DeepseekV3Config(**SMALL), "deepseek_v3.*latent attention"),
    "shared keys and values": (
        lambda: transformers.Gemma3nTextConfig(
            **{**SMALL, "intermediate_size": [48, 48]}, num_kv_shared_layers=1, layer_types=["full_attention"] * 2,
            activation_sparsity_pattern=[0.0, 0.0],
        ),
        "gemma3n_text.*share keys and values",
    ),
    "encoder and decoder": (lambda: transformers.T5Config(vocab_size=97), "t5.*encoder and decoder"),
    "multimodal": (transformers.LlavaConfig, "llava.*multimodal"),
    "no text": (transformers.ViTConfig, "vit.*do not generate text"),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_cannot_be_served_is_refused_by_name(
    make: Callable[[], PreTrainedConfig], sentence: str, path: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        fitted(model_of(make()), SETTINGS, path_of(path))


class _Idle(torch.nn.Module):
    """A layer without attention."""

    def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden


class _Neighbourly(torch.nn.Module):
    """An MLP that looks at the token before, as a convolution would, under a name that says nothing."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.inner(hidden) + torch.roll(hidden, 1, dims=1)
        return mixed


@pytest.mark.parametrize("path", PATHS)
def test_the_probe_finds_rows_that_leak_where_no_name_tells(path: str) -> None:
    model = model_of(llama())
    layer: Any = model.get_submodule("model.layers.1")
    layer.mlp = _Neighbourly(layer.mlp)
    with pytest.raises(StartupError, match="llama cannot be served: its layers mix rows"):
        Probe(model, 97, path_of(path)).check()


@pytest.mark.parametrize("path", PATHS)
def test_the_probe_finds_layers_that_do_not_attend(path: str) -> None:
    model = model_of(llama())
    model.config.num_hidden_layers = 3
    layers: Any = model.get_submodule("model.layers")
    layers.append(_Idle())
    with pytest.raises(StartupError, match="llama cannot be served: 2 of its 3 layers attend"):
        Probe(model, 97, path_of(path)).check()


@pytest.mark.parametrize("path", PATHS)
def test_the_probe_finds_a_window_that_the_code_does_not_name(path: str) -> None:
    model = model_of(llama())
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = 64
    with pytest.raises(StartupError, match="does not name its sliding windows"):
        Probe(model, 97, path_of(path)).check()


def test_the_pool_is_sized_by_what_a_position_really_takes() -> None:
    executor: TorchExecutor = fitted(model_of(llama()), SETTINGS, TorchPath()).executor
    assert executor.size.blocks == 64
    assert executor.size.max_model_len == 256
    assert Probe(model_of(llama()), 97, TorchPath()).check() == 2 * 2 * 2 * 8 * 4
