"""Attention over a paged KV pool, called by transformers' own layers (`AttentionInterface`).

A step's rows lie end to end in one ragged batch. Each layer writes the keys and values of all new tokens, then each row
attends over its own slots alone::

    queries  [1, heads, ΣL, dim]        row a | row b ....... | row c
    pool     [slots, kv heads, dim]     slot = block * block_tokens + offset

What differs from step to step (slots, tables, lengths) does not travel through the model: the layer finds it in
``step``, one object per step, made aside and swapped in when the step begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.worker.executor import Batch, Row

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keywords that travel through transformers' layers and say nothing about the attention itself."""


class Unsupported(Exception):
    """A layer's attention needs something that is not passed on here; the text names it."""


@dataclass(frozen=True, slots=True)
class RowView:
    """Where one row lies in the ragged batch, and in the pool."""

    first: int
    start: int
    end: int
    slots: torch.Tensor
    """The slots of positions 0 to ``end``, in order."""

    @property
    def count(self) -> int:
        """Tokens of this row in the batch."""
        return self.end - self.start


@dataclass(slots=True)
class StepView:
    """All that the attention of one step needs: where to write, and where each row reads."""

    written: torch.Tensor
    rows: tuple[RowView, ...]
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    """Masks of rows by (row, window): made in the first layer that needs one, used by all others."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """The sliding window that each layer asked for; also the list of layers that attended."""

    @classmethod
    def of(cls, batch: Batch, block_tokens: int) -> "StepView":
        """Return the view of a batch."""
        views: list[RowView] = []
        first = 0
        for row in batch:
            views.append(RowView(first, row.start, row.end, _slots(row, block_tokens)))
            first += len(row.token_ids)
        return cls(torch.cat([view.slots[view.start :] for view in views]), tuple(views))

    def mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Return which of its keys each query of a row sees, None where it sees all."""
        key = (index, window or 0)
        if key not in self.masks:
            self.masks[key] = _mask(self.rows[index], window)
        return self.masks[key]


class PagedAttention:
    """Keys and values of every layer, and the function that layers call. One model, one instance, one name."""

    _instances = 0

    def __init__(self, *, slots: int, dtype: torch.dtype) -> None:
        self._slots = slots
        self._dtype = dtype
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self.step: StepView | None = None
        """The step that is being executed; only the step thread sets it."""
        PagedAttention._instances += 1
        # a name of its own: the interface is global, and a process may hold several models
        self.name = f"slipstream_{PagedAttention._instances}"
        AttentionInterface.register(self.name, self)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        """Return ``[1, ΣL, heads, dim]``. Raises Unsupported for what cannot be computed exactly here."""
        if self.step is None:
            raise RuntimeError("attention outside of a step")
        layer = _layer(module, key, value, attention_mask)
        asked = _Asked.of(options)
        if layer in self.step.windows:
            raise Unsupported("several attentions in one layer")
        self.step.windows[layer] = asked.window
        keys, values = self._write(layer, key, value)
        rows = [
            _attend(query[0, :, row.first : row.first + row.count], keys, values, self.step, index, asked)
            for index, row in enumerate(self.step.rows)
        ]
        return torch.cat(rows, dim=1).transpose(0, 1).unsqueeze(0).contiguous(), None

    def bytes_per_position(self) -> int:
        """Return what one position takes in all layers seen so far."""
        pools = (*self._keys.values(), *self._values.values())
        return sum(pool[0].numel() * pool.element_size() for pool in pools)

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the new tokens' keys and values into their slots and return the layer's pool."""
        assert self.step is not None  # noqa: S101 - checked by the caller
        if layer not in self._keys:
            shape = (self._slots, key.shape[1], key.shape[3])
            self._keys[layer] = torch.empty(shape, dtype=self._dtype)
            self._values[layer] = torch.empty(shape, dtype=self._dtype)
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self.step.written, key[0].transpose(0, 1).to(self._dtype))
        values.index_copy_(0, self.step.written, value[0].transpose(0, 1).to(self._dtype))
        return keys, values


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a layer asks of its attention, beyond causal."""

    scale: float | None
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, options: Mapping[str, object]) -> "_Asked":
        known = dict(options)
        scale = known.pop("scaling", None)
        window = known.pop("sliding_window", None)
        softcap = known.pop("softcap", None)
        if known.pop("dropout", 0.0):
            raise Unsupported("dropout")
        if known.pop("is_causal", None) is False:
            raise Unsupported("attention that is not causal")
        strange = sorted(name for name, given in known.items() if given is not None and name not in _HARMLESS)
        if strange:
            raise Unsupported(f"attention with {', '.join(strange)}")
        return cls(_number(scale), None if window is None else int(_number(window) or 0) or None, _number(softcap))


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


def _slots(row: Row, block_tokens: int) -> torch.Tensor:
    blocks = torch.tensor(row.table, dtype=torch.int64)
    return (blocks[:, None] * block_tokens + torch.arange(block_tokens)).reshape(-1)[: row.end]


def _first_key(row: RowView, window: int | None) -> int:
    """Return the first position that any query of a row still sees."""
    return 0 if window is None else max(row.start - window + 1, 0)


def _mask(row: RowView, window: int | None) -> torch.Tensor | None:
    if row.count == 1:
        return None  # the only query is the newest token, and what its window leaves out is not gathered
    queries = torch.arange(row.start, row.end)[:, None]
    keys = torch.arange(_first_key(row, window), row.end)[None, :]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepView, index: int, asked: _Asked
) -> torch.Tensor:
    """Return ``[heads, count, dim]`` of one row, whose queries are given as ``[heads, count, dim]``."""
    row = step.rows[index]
    slots = row.slots[_first_key(row, asked.window) :]
    key = keys.index_select(0, slots).transpose(0, 1)
    value = values.index_select(0, slots).transpose(0, 1)
    kv_heads, length, dim = key.shape
    # query heads that share a KV head stand together, so that keys and values need no copy for each of them
    grouped = query.reshape(kv_heads, -1, row.count, dim)
    per_head = (kv_heads, grouped.shape[1], length, dim)
    key, value = key.unsqueeze(1).expand(per_head), value.unsqueeze(1).expand(per_head)
    mask = step.mask(index, asked.window)
    if asked.softcap is None:
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=asked.scale)
    else:
        out = _capped(grouped, key, value, mask, asked)
    return out.reshape(-1, row.count, dim)


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, asked: _Asked
) -> torch.Tensor:
    """Attend with scores bent to ``softcap * tanh(score / softcap)``, which the fused kernel cannot do."""
    assert asked.softcap is not None  # noqa: S101 - checked by the caller
    scale = query.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / asked.softcap) * asked.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)
