"""What every way to compute attention is given: one step's arrays, a layer's pool, and what the layer asks for.

What differs from step to step does not travel through the model: it lies in a `StepView`, made aside and swapped in
when the step begins. The arrays are numpy's, because preparing a step is bookkeeping and no part of a graph::

    token_ids, positions, slots     row a | row b ....... | row c        one entry for each new token
    firsts, starts, ends            one entry for each row
    tables                          blocks of a | blocks of b | ...      a row's begin at table_firsts
"""

from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.executor import Batch

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Unsupported(Exception):
    """A layer's attention needs something that is not passed on here; the text names it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a layer asks of its attention, beyond causal."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Keys and values of one layer, each ``[blocks, KV heads, block positions, dim]``."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class New:
    """What a layer made of the step's tokens: queries ``[heads, tokens, dim]``, keys and values likewise."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepView:
    """All that one step needs beside the weights: what is fed, where it is written, and where each row reads."""

    block_tokens: int
    token_ids: Int64s
    positions: Int64s
    slots: Int64s
    """Where each new token is written: block times ``block_tokens``, plus its place in the block."""
    firsts: Int32s
    starts: Int32s
    ends: Int32s
    table_firsts: Int32s
    tables: Int32s

    @classmethod
    def of(cls, batch: Batch, block_tokens: int) -> "StepView":
        """Return the view of a batch."""
        rows = len(batch)
        counts = np.fromiter((len(row.token_ids) for row in batch), np.int32, rows)
        starts = np.fromiter((row.start for row in batch), np.int32, rows)
        blocks = np.fromiter((len(row.table) for row in batch), np.int32, rows)
        tables = np.fromiter(chain.from_iterable(row.table for row in batch), np.int32, int(blocks.sum()))
        token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in batch), np.int64, int(counts.sum()))
        firsts, table_firsts = _firsts(counts), _firsts(blocks)
        positions = np.arange(len(token_ids)) - np.repeat(firsts - starts, counts)
        block = tables[np.repeat(table_firsts, counts) + positions // block_tokens]
        slots = block * np.int64(block_tokens) + positions % block_tokens
        return cls(block_tokens, token_ids, positions, slots, firsts, starts, starts + counts, table_firsts, tables)


class RunningStep(Protocol):
    """A step under way, on one path."""

    def attend(self, pool: Pool, new: New, asked: Asked) -> torch.Tensor:
        """Write the new keys and values, let each row attend to its own, and return ``[tokens, heads, dim]``."""


class AttentionPath(Protocol):
    """One way to compute attention over block tables."""

    def begin(self, view: StepView) -> RunningStep:
        """Return what all layers of a step share."""


def _firsts(counts: Int32s) -> Int32s:
    """Return where each part begins when all lie end to end."""
    return np.cumsum(counts, dtype=np.int32) - counts
