"""What executes a step: the batch it is given and the tokens it gives back. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.guide import Guide
from services.worker.history import History
from shared.ids import BlockId, RequestId
from shared.protocol.messages import Logprobs, Sampling, TokenizerFiles, WorkerSize


@dataclass(frozen=True, slots=True)
class Draw:
    """One token is to be drawn; ``position`` is its index in prompt + output.

    ``history`` is there if the draw depends on earlier tokens; the worker's ledger changes it when no step of its
    request runs. ``guide`` is there if the output follows a grammar; only the step that draws moves it on.
    """

    sampling: Sampling
    position: int
    history: History | None = None
    guide: Guide | None = None


LEAST = -9999.0
"""What a token is told with that the model rules out: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a row tells of the tokens that follow those it feeds, one by one: how likely the model found them.

    ``first`` is the place of the first of them in the prompt; ``most`` of the likeliest tokens are told beside each.
    """

    first: int
    token_ids: tuple[int, ...]
    most: int


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: ``token_ids`` are fed from position ``start``, keys and values go to ``table``.

    Positions before ``start`` are in it already; another request may have written them, and others may read them now.
    ``draw`` is None while the slice does not reach the last token known.

    A row that is laid out while the step before it still runs may have to feed what that step will draw: ``awaits`` is
    the place of that token among its outcomes, and ``token_ids`` holds one id that stands for it.
    """

    request: RequestId
    start: int
    token_ids: tuple[int, ...]
    table: tuple[BlockId, ...]
    draw: Draw | None
    awaits: int | None = None
    scores: Scores | None = None

    @property
    def has_outcome(self) -> bool:
        """Whether something comes of it beside keys and values."""
        return self.draw is not None or self.scores is not None

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


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of a row that tells of its prompt; ``drawn`` is None if it drew nothing."""

    logprobs: tuple[Logprobs, ...]
    drawn: int | Drawn | None = None


Outcome = int | Drawn | DrawFailed | Scored


def token_of(outcome: Outcome) -> int:
    """Return the token that was drawn; 0, to be fed in vain, if none could be."""
    match outcome:
        case int():
            return outcome
        case Drawn():
            return outcome.token_id
        case Scored():
            return 0 if outcome.drawn is None else token_of(outcome.drawn)
        case DrawFailed():
            return 0


def known_ids(row: Row, before: Sequence[Outcome]) -> tuple[int, ...]:
    """Return what a row feeds once the step before it has had these outcomes."""
    return row.token_ids if row.awaits is None else (token_of(before[row.awaits]),)


Step = Callable[[Sequence[Outcome]], tuple[Outcome, ...]]
"""A batch laid out: given the outcomes of the step before, which some rows may await, it runs and returns its own."""


class Executor(Protocol):
    """A model with its KV pool. Steps run on one thread only, one after the other."""

    @property
    def size(self) -> WorkerSize:
        """What fits into the pool."""

    @property
    def vocabulary(self) -> int:
        """Token ids from here on do not exist."""

    def prepare(self, batch: Batch) -> Step:
        """Lay a batch out, aside of the pool and of a step that may be running meanwhile on another thread.

        The step writes the batch into the pool and returns an outcome for each row that has one, in order of rows.
        Whatever either raises ends the worker's life under its present id.
        """

    def expect(self, grammar: str) -> None:
        """Begin to make what rows with this grammar will need, aside: a request that has it has arrived."""

    def forget(self) -> None:
        """Drop what the pool holds; the weights stay."""


Finish = Callable[[], Callable[[], None] | None]
"""Work between two steps, on their thread; what it returns, if anything, is done beside them again."""
Later = Callable[[], Finish]
"""Work beside the first steps, on a thread of its own."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to serve."""

    executor: Executor
    tokenizer: TokenizerFiles
    dtype: str
    later: Later | None = None
