"""What executes a step: the batch it is given and the tokens it gives back. No torch here."""

from dataclasses import dataclass
from typing import Protocol

from services.worker.history import History
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Logprobs, Sampling, TokenizerFiles, WorkerSize


@dataclass(frozen=True, slots=True)
class Draw:
    """One token is to be drawn; ``position`` is its index in prompt + output.

    ``history`` is there if the draw depends on earlier tokens; the worker's ledger changes it between two steps.
    """

    sampling: Sampling
    position: int
    history: History | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: ``token_ids`` are fed from position ``start``, keys and values go to ``table``.

    Positions before ``start`` are in it already; another request may have written them, and others may read them now.
    ``draw`` is None while the slice does not reach the last token known.
    """

    request: RequestId
    start: int
    token_ids: tuple[int, ...]
    table: tuple[BlockId, ...]
    draw: Draw | None

    @property
    def end(self) -> int:
        """Positions that hold keys and values once this step is done."""
        return self.start + len(self.token_ids)


Batch = tuple[Row, ...]
"""All rows of a step, laid end to end without padding: ORCA's ragged ``[ΣL, H]``."""


@dataclass(frozen=True, slots=True)
class DrawFailed:
    """No token could be drawn for one row; the other rows are not touched by it."""

    why: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of a row that asked for logprobs."""

    token_id: int
    logprobs: Logprobs


Outcome = int | Drawn | DrawFailed


class Executor(Protocol):
    """A model with its KV pool. Used from one thread only."""

    @property
    def size(self) -> WorkerSize:
        """What fits into the pool."""

    @property
    def vocabulary(self) -> int:
        """Token ids from here on do not exist."""

    def execute(self, batch: Batch) -> tuple[Outcome, ...]:
        """Write the batch into the pool and return one outcome for each row that draws, in order of rows.

        Whatever it raises ends the worker's life under its present id.
        """

    def forget(self) -> None:
        """Drop what the pool holds; the weights stay."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to serve."""

    executor: Executor
    tokenizer: TokenizerFiles
    dtype: str
