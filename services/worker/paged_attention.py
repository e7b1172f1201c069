"""Attention over a paged KV pool, called by transformers' own layers (`AttentionInterface`).

A step's rows lie end to end in one ragged batch. Each layer writes the keys and values of all new tokens, then each row
attends over its own blocks alone::

    queries  [1, heads, ΣL, dim]                      row a | row b ....... | row c
    pool     [blocks, KV heads, positions, dim]       for each layer, one of keys and one of values

To the model all of this is one operator without side effects: it takes what the layer made and finds pool and step by a
number, outside of the graph. So a model compiles to one graph, and nothing copies the pool.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from weakref import WeakValueDictionary

import torch
from transformers import AttentionInterface

from services.worker.attention_memory import empty_pool
from services.worker.attention_path import Asked, AttentionPath, New, Pool, RunningStep, StepView, Unsupported
from services.worker.attention_torch import TorchPath

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keywords that travel through transformers' layers and say nothing about the attention itself."""

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]


class PagedAttention:
    """Keys and values of every layer, and the name under which layers find them. One model, one instance."""

    def __init__(
        self, *, blocks: int, block_tokens: int, dtype: torch.dtype, path: AttentionPath | None = None
    ) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._path = path or TorchPath()
        self._pools: dict[int, Pool] = {}
        self._step: RunningStep | None = None
        self.windows: dict[int, int | None] = {}
        """Of the last step: the layers that attended, and the sliding window each asked for."""
        self.number = number = next(_numbers)
        """By which the operator finds this instance."""
        _instances[number] = self
        # a name of its own: the interface is global, and a process may hold several models
        self.name = f"slipstream_{number}"
        AttentionInterface.register(self.name, _function(number))

    @contextmanager
    def step(self, view: StepView) -> Iterator[RunningStep]:
        """Swap a step in while the model runs it. Only the step thread does."""
        self._step = self._path.begin(view)
        self.windows = {}
        try:
            yield self._step
        finally:
            self._step = None

    def attend(self, layer: int, new: New, asked: Asked) -> torch.Tensor:
        """Return ``[ΣL, heads, dim]``. Raises Unsupported if a layer attends twice."""
        if self._step is None:
            raise RuntimeError("attention outside of a step")
        if layer in self.windows:
            raise Unsupported("several attentions in one layer")
        self.windows[layer] = asked.window
        return self._step.attend(self.pool(layer, new.keys.shape[0], new.keys.shape[2]), new, asked)

    def bytes_per_position(self) -> int:
        """Return what one position takes in all layers seen so far."""
        tensors = [tensor for pool in self._pools.values() for tensor in (pool.keys, pool.values)]
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in tensors)

    def pool(self, layer: int, kv_heads: int, dim: int) -> Pool:
        """Return a layer's pool, made when it is asked for the first time."""
        if layer not in self._pools:
            shape = (self._blocks, kv_heads, self._block_tokens, dim)
            self._pools[layer] = Pool(empty_pool(shape, self._dtype), empty_pool(shape, self._dtype))
        return self._pools[layer]


_numbers = count(1)
_instances: WeakValueDictionary[int, PagedAttention] = WeakValueDictionary()
"""By the number that stands in a model's graph. Weak: the interface keeps what is registered for ever."""


@torch.library.custom_op("slipstream::paged_attention", mutates_args=())
def _paged_attention(  # noqa: PLR0913, PLR0917 - an operator's schema is flat
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    instance: int,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Return ``[1, ΣL, heads, dim]``; window and softcap are 0 for none."""
    asked = Asked(scale, window or None, softcap or None)
    return _instances[instance].attend(layer, New(query[0], key[0], value[0]), asked).unsqueeze(0)


@_paged_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], query.shape[3]))


def _function(instance: int) -> AttentionFunction:
    """Return what transformers' layers call: it checks what they ask for, once where the model is compiled."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        layer = _layer(module, key, value, attention_mask)
        asked = _asked(options, query.shape[3])
        out = _paged_attention(query, key, value, instance, layer, asked.scale, asked.window or 0, asked.softcap or 0.0)
        return out, None

    return attention


def _asked(options: Mapping[str, object], dim: int) -> Asked:
    """Return what a layer asks for. Raises Unsupported for what cannot be computed exactly here."""
    known = dict(options)
    scale = _number(known.pop("scaling", None))
    window = _number(known.pop("sliding_window", None))
    softcap = _number(known.pop("softcap", None))
    if known.pop("dropout", 0.0):
        raise Unsupported("dropout")
    if known.pop("is_causal", None) is False:
        raise Unsupported("attention that is not causal")
    strange = sorted(name for name, given in known.items() if given is not None and name not in _HARMLESS)
    if strange:
        raise Unsupported(f"attention with {', '.join(strange)}")
    return Asked(dim**-0.5 if scale is None else float(scale), int(window or 0) or None, float(softcap or 0.0) or None)


def _number(given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, int | float):
        return given
    raise Unsupported(f"attention with a {type(given).__name__} where a number is expected")


def _layer(module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise Unsupported("attention layers without a number")
    if attention_mask is not None:
        raise Unsupported("an attention mask of its own")
    if getattr(module, "is_causal", True) is False:
        raise Unsupported("attention that is not causal")
    if key.shape != value.shape:
        raise Unsupported("keys and values of unequal size")
    return layer
