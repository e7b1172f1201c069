"""Attention over block tables by torch alone: gathers each row's keys and values. Slower, and runs anywhere."""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.worker.attention_path import Asked, New, Pool, RunningStep, StepView


class TorchPath:
    """Gathers, then attends with torch's own attention."""

    def begin(self, view: StepView) -> RunningStep:
        """Return what all layers of a step share."""
        slots = torch.from_numpy(view.slots)
        sizes = zip(view.firsts, view.starts, view.ends, view.table_firsts, strict=True)
        tables = torch.from_numpy(view.tables).to(torch.int64)
        rows = tuple(
            _Row(int(first), int(start), int(end), tables[table : table + -(-int(end) // view.block_tokens)])
            for first, start, end, table in sizes
        )
        return _TorchStep(slots // view.block_tokens, slots % view.block_tokens, rows, view.block_tokens)


@dataclass(frozen=True, slots=True)
class _Row:
    """Where one row lies in the ragged batch, and in the pool."""

    first: int
    start: int
    end: int
    blocks: torch.Tensor

    @property
    def count(self) -> int:
        return self.end - self.start

    def first_key(self, window: int | None) -> int:
        """Return the first position that any query of the row still sees."""
        return 0 if window is None else max(self.start - window + 1, 0)


@dataclass(frozen=True, slots=True)
class _TorchStep:
    written_blocks: torch.Tensor
    written_offsets: torch.Tensor
    rows: tuple[_Row, ...]
    block_tokens: int
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)
    """Masks of rows by (row, window): made in the first layer that needs one, used by all others."""
    places: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Where a row's keys lie by (row, KV heads), as ``[KV heads, positions]`` of vectors in the pool; likewise."""

    def attend(self, pool: Pool, new: New, asked: Asked) -> torch.Tensor:
        where = (self.written_blocks, self.written_offsets)
        for stored, given in ((pool.keys, new.keys), (pool.values, new.values)):
            stored.transpose(1, 2).index_put_(where, given.transpose(0, 1).to(stored.dtype))
        rows = [self._row(index, pool, new.queries, asked) for index in range(len(self.rows))]
        return torch.cat(rows, dim=1).transpose(0, 1).to(new.queries.dtype).contiguous()

    def _row(self, index: int, pool: Pool, queries: torch.Tensor, asked: Asked) -> torch.Tensor:
        """Return ``[heads, count, dim]`` of one row."""
        row = self.rows[index]
        kv_heads, dim = pool.keys.shape[1], pool.keys.shape[3]
        places = self._places(index, kv_heads)[:, row.first_key(asked.window) :]
        key, value = (
            stored.view(-1, dim).index_select(0, places.reshape(-1)).view(kv_heads, 1, -1, dim)
            for stored in (pool.keys, pool.values)
        )
        query = queries[:, row.first : row.first + row.count].to(pool.keys.dtype)
        # query heads that share a KV head stand together, so that keys and values need no copy for each of them
        grouped = query.reshape(kv_heads, -1, row.count, dim)
        mask = self._mask(index, asked.window)
        if asked.softcap is None:
            per_head = (-1, grouped.shape[1], -1, -1)
            key, value = key.expand(per_head), value.expand(per_head)
            out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=asked.scale)
        else:
            out = _capped(grouped, key, value, mask, asked.scale, asked.softcap)
        return out.reshape(-1, row.count, dim)

    def _places(self, index: int, kv_heads: int) -> torch.Tensor:
        key = (index, kv_heads)
        if key not in self.places:
            row, size = self.rows[index], self.block_tokens
            of_heads = (row.blocks * kv_heads + torch.arange(kv_heads)[:, None]) * size
            self.places[key] = (of_heads[:, :, None] + torch.arange(size)).reshape(kv_heads, -1)[:, : row.end]
        return self.places[key]

    def _mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Return which of its keys each query of a row sees, None where it sees all."""
        key = (index, window)
        if key not in self.masks:
            self.masks[key] = _mask(self.rows[index], window)
        return self.masks[key]


def _mask(row: _Row, window: int | None) -> torch.Tensor | None:
    if row.count == 1:
        return None  # the only query is the newest token, and what its window leaves out is not gathered
    queries = torch.arange(row.start, row.end)[:, None]
    keys = torch.arange(row.first_key(window), row.end)[None, :]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attend with scores bent to ``softcap * tanh(score / softcap)``, which the fused kernel cannot do."""
    query, key, value = query.float(), key.float(), value.float()
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), value)
