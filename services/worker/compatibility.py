"""Which models may be served: refused by name at load, before anything is answered wrongly.

A ragged batch lays the tokens of all requests end to end and attention alone keeps them apart. A layer that mixes
neighbouring rows, or an attention that needs what we do not pass, would give tokens that look right and are not.
"""

import inspect
import re
from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shared.errors import StartupError

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "dense", "sparse"})
"""``dense`` and ``sparse`` name kinds of MLP, which are token-wise."""
_SERVED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_ALIBI_TYPES = frozenset({"bloom", "mpt"})
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_MIXING_LAYER = re.compile(
    r"Mamba|SSM|ShortConv|CausalConv|R[Ww][Kk][Vv]|Recurrent|Delta[Nn]et|LinearAttention|LightningAttention|Indexer|Hyena"
)
_UNSERVED_SETTINGS = {
    "num_kv_shared_layers": "layers that share keys and values",
    "use_bidirectional_attention": "bidirectional attention",
    "attention_chunk_size": "chunked attention",
    "kv_lora_rank": "latent attention, whose keys and values differ in size",
    "mamba_d_state": "state-space layers",
    "conv_L_cache": "convolution layers",
}


def refusal(model_type: str, feature: str) -> StartupError:
    """Return the sentence for a model that cannot be served."""
    return StartupError(f"models of type {model_type} cannot be served: {feature}")


def check_config(config: PreTrainedConfig) -> None:
    """Raise StartupError, naming model type and feature, if the configuration alone shows that it cannot be served."""
    for feature in _features(config):
        raise refusal(config.model_type, feature)


def check_class(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise StartupError if the model's code does not take an attention function, or projects every row."""
    if not model_class._supports_attention_backend:  # noqa: SLF001 - transformers has no public way to ask
        raise refusal(config.model_type, "its code does not take an attention function of ours")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise refusal(config.model_type, "its code cannot leave out logits that nobody needs")


def check_modules(model: PreTrainedModel) -> None:
    """Raise StartupError if a layer mixes neighbouring tokens other than by attention."""
    for module in model.modules():
        is_convolution = isinstance(module, torch.nn.modules.conv._ConvNd)  # noqa: SLF001 - their common base
        if is_convolution or _MIXING_LAYER.search(type(module).__name__):
            feature = f"its {type(module).__name__} layers mix the rows of a batch"
            raise refusal(model.config.model_type, feature)


def _features(config: PreTrainedConfig) -> Iterator[str]:
    """Yield every feature that cannot be served."""
    if config.is_encoder_decoder:
        yield "encoder and decoder"
    if config.get_text_config() is not config or hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        yield "more than text (multimodal)"
    if getattr(config, "alibi", False) or config.model_type in _ALIBI_TYPES:
        yield "ALiBi position biases"
    yield from (f"{name.replace('_', ' ')} layers" for name in _strange_layers(config))
    yield from (f"rotary positions of type {name}" for name in _strange_rope(config))
    yield from (feature for name, feature in _UNSERVED_SETTINGS.items() if getattr(config, name, None))


def _strange_layers(config: PreTrainedConfig) -> list[str]:
    named: set[str] = set()
    for attribute in _LAYER_LISTS:
        named.update(str(name) for name in getattr(config, attribute, None) or ())
    return sorted(named - SERVED_LAYER_TYPES)


def _strange_rope(config: PreTrainedConfig) -> list[str]:
    """Return the rotary types that look at the whole batch (``longrope``, ``dynamic``), or that we do not know."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [given for given in parameters.values() if isinstance(given, Mapping)]
    given = per_layer_type or [parameters]
    types = {str(one.get("rope_type") or "default") for one in given}
    sections = {"with sections (mrope)" for one in given if one.get("mrope_section")}
    return sorted((types - _SERVED_ROPE_TYPES) | sections)


def expected_windows(config: PreTrainedConfig) -> list[int | None] | None:
    """Return each layer's sliding window, or None where the configuration knows of none.

    Without a list of layer types the window is every layer's: code that applies it by its mask alone is found out.
    """
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is None:
        return [window] * config.num_hidden_layers if window else None
    return [window if kind == "sliding_attention" else None for kind in layer_types]
