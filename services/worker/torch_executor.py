"""A real model: transformers' own code with our attention, one ragged batch per step."""

from collections.abc import Mapping
from typing import Protocol

import torch

from services.worker.executor import Batch, Outcome
from services.worker.paged_attention import PagedAttention, StepView
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
        self.windows: Mapping[int, int | None] = {}
        """Of the last step: the layers that attended, and the sliding window each asked for."""

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
        ids = [token for row in batch for token in row.token_ids]
        positions = [position for row in batch for position in range(row.start, row.end)]
        view = StepView.of(batch, self.size.block_tokens)
        self._attention.step = view
        try:
            output = self._model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                logits_to_keep=wanted,
            )
        finally:
            self._attention.step = None
            self.windows = view.windows
        return output.logits[0]


def last_tokens(batch: Batch) -> torch.Tensor:
    """Return where in the ragged batch the last tokens of the drawing rows lie: only they need logits."""
    places: list[int] = []
    first = 0
    for row in batch:
        first += len(row.token_ids)
        if row.draw is not None:
            places.append(first - 1)
    return torch.tensor(places, dtype=torch.int64)
