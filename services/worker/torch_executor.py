"""A real model: transformers' own code with our attention, one ragged batch per step."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from services.worker.attention_path import StepView
from services.worker.executor import Batch, Outcome
from services.worker.paged_attention import PagedAttention
from services.worker.sampling import draw_tokens
from shared.protocol.messages import WorkerSize


class _Output(Protocol):
    logits: torch.Tensor


class CausalModel(Protocol):
    """What we call of a transformers model."""

    def __call__(self, **inputs: object) -> _Output:
        """Run the model forward."""


class TorchExecutor:
    """Runs steps of a model whose attention is ``attention``."""

    def __init__(self, model: CausalModel, attention: PagedAttention, *, size: WorkerSize, vocabulary: int) -> None:
        self._model = model
        self._attention = attention
        self.size = size
        self.vocabulary = vocabulary

    @property
    def windows(self) -> Mapping[int, int | None]:
        """Of the last step: the layers that attended, and the sliding window each asked for."""
        return self._attention.windows

    def forget(self) -> None:
        """Do nothing: a slot is always written before a row that owns it reads it."""

    def execute(self, batch: Batch) -> tuple[Outcome, ...]:
        """Run one step and draw the tokens of the rows that sample."""
        logits = self.logits(batch)
        with torch.inference_mode():
            return draw_tokens(logits, [row.draw for row in batch if row.draw is not None])

    def logits(self, batch: Batch) -> torch.Tensor:
        """Write a batch into the pool and return ``[rows that draw, vocabulary]``."""
        return self.forward(batch, last_tokens(batch))

    @torch.inference_mode()
    def forward(self, batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
        """Write a batch into the pool and return the logits after the tokens at ``wanted`` places of the batch."""
        view = StepView.of(batch, self.size.block_tokens)
        with self._attention.step(view):
            output = self._model(
                input_ids=torch.from_numpy(view.token_ids)[None],
                position_ids=torch.from_numpy(view.positions)[None],
                use_cache=False,
                logits_to_keep=wanted,
            )
        return output.logits[0]


def last_tokens(batch: Batch) -> torch.Tensor:
    """Return where in the ragged batch the last tokens of the drawing rows lie: only they need logits."""
    ends = np.cumsum([len(row.token_ids) for row in batch], dtype=np.int64)
    draws = np.fromiter((row.draw is not None for row in batch), np.bool_, len(batch))
    return torch.from_numpy(ends[draws] - 1)
