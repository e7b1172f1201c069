"""Random ragged batches for attention, and what they must come to: straightforward, in float64."""

import math
import random
from dataclasses import dataclass

import torch

from services.worker.attention_path import Asked, AttentionPath, New, Pool, StepView
from services.worker.executor import Row
from shared.ids import BlockId, RequestId


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 3
    group: int = 3
    dim: int = 64
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Case:
    """A step: its view, the pool as it is before, and what the layer made of the new tokens."""

    view: StepView
    pool: Pool
    new: New

    def attend(self, path: AttentionPath, asked: Asked) -> tuple[torch.Tensor, Pool]:
        """Return what comes out, and the pool as it is then."""
        pool = Pool(self.pool.keys.clone(), self.pool.values.clone())
        with torch.inference_mode():
            return path.begin(self.view).attend(pool, self.new, asked), pool


def case_of(shape: Shape, spans: list[tuple[int, int]], seed: int) -> Case:
    """Return a step with a row for each (start, end). Every slot that no row has written is NaN."""
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    size = shape.block_tokens
    needed = [-(-end // size) for _, end in spans]
    free = [BlockId(block) for block in range(sum(needed) + 3)]
    numbers.shuffle(free)
    tables = [tuple(free.pop() for _ in range(count)) for count in needed]
    pool = _poisoned(shape, sum(needed) + 3)
    for (start, _), table in zip(spans, tables, strict=True):
        for at, block in enumerate(table):
            written = max(0, min(size, start - at * size))
            for tensor in (pool.keys, pool.values):
                tensor[block, :, :written] = torch.randn(shape.kv_heads, written, shape.dim)
    rows = tuple(
        Row(RequestId(str(at)), start, (0,) * (end - start), table, None)
        for at, ((start, end), table) in enumerate(zip(spans, tables, strict=True))
    )
    return Case(StepView.of(rows, size), pool, _new(shape, sum(end - start for start, end in spans)))


def only(case: Case, row: int) -> Case:
    """Return the step with one of its rows alone."""
    view = case.view
    first, start, end = (int(array[row]) for array in (view.firsts, view.starts, view.ends))
    table = view.tables[int(view.table_firsts[row]) :][: -(-end // view.block_tokens)]
    alone = Row(RequestId("alone"), start, (0,) * (end - start), tuple(BlockId(int(block)) for block in table), None)
    mine = slice(first, first + end - start)
    new = New(case.new.queries[:, mine], case.new.keys[:, mine], case.new.values[:, mine])
    return Case(StepView.of((alone,), view.block_tokens), case.pool, new)


def expected(case: Case, written: Pool, asked: Asked) -> torch.Tensor:
    """Return ``[tokens, heads, dim]`` in float64, from a pool that has the new keys and values."""
    queries = case.new.queries.double()
    group = queries.shape[0] // written.keys.shape[1]
    out = torch.empty(queries.shape[1], queries.shape[0], queries.shape[2], dtype=torch.float64)
    view = case.view
    for first, start, end, table in zip(view.firsts, view.starts, view.ends, view.table_firsts, strict=True):
        blocks = torch.from_numpy(view.tables[table : table + -(-end // view.block_tokens)]).long()
        keys, values = (
            tensor[blocks].transpose(0, 1).flatten(1, 2)[:, :end].double().repeat_interleave(group, 0)
            for tensor in (written.keys, written.values)
        )
        scores = queries[:, first : first + end - start] @ keys.transpose(1, 2) * asked.scale
        if asked.softcap:
            scores = torch.tanh(scores / asked.softcap) * asked.softcap
        ahead = torch.arange(end)[None] - torch.arange(start, end)[:, None]
        hidden = (ahead > 0) | (ahead <= -(asked.window or end + 1))
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        out[first : first + end - start] = (weights @ values).transpose(0, 1)
    return out


def _poisoned(shape: Shape, blocks: int) -> Pool:
    size = (blocks, shape.kv_heads, shape.block_tokens, shape.dim)
    return Pool(*(torch.full(size, math.nan, dtype=shape.dtype) for _ in range(2)))


def _new(shape: Shape, tokens: int) -> New:
    heads = shape.kv_heads * shape.group
    # as layers make them: heads side by side for each token, or each head's tokens side by side
    queries = torch.randn(tokens, heads, shape.dim).to(shape.dtype).transpose(0, 1)
    keys = torch.randn(shape.kv_heads, tokens, shape.dim).to(shape.dtype)
    return New(queries, keys, torch.randn(tokens, shape.kv_heads, shape.dim).to(shape.dtype).transpose(0, 1))
