"""An executor without a model: deterministic tokens that depend on every block the plan names.

It keeps a real pool. Each step writes (token, position) through the planned table and reads the whole context back
through it, whoever wrote it; the next token is a hash of what was read, so that a wrong block is a wrong token.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from services.worker.executor import (
    LEAST,
    Batch,
    Draw,
    DrawFailed,
    Drawn,
    Loaded,
    Outcome,
    Row,
    Scored,
    Scores,
    Step,
    known_ids,
)
from services.worker.fake_tokenizer import EOS_ID, VOCABULARY, fake_tokenizer_files
from services.worker.grammars import Allowed, Grammars, Guided, guided_of, without
from services.worker.kv_size import BLOCK_TOKENS, DEFAULT_KV_TOKENS
from services.worker.progress import Progress
from shared.errors import StartupError
from shared.protocol.messages import Logprobs, Ranked, WorkerSize
from shared.runtime.clock import Clock, monotonic
from shared.runtime.settings import WorkerSettings

FAKE_MAX_MODEL_LEN = 8192
_FIRST_PRINTABLE, _PRINTABLES = 32, 95
_ONE_IN = 64
"""One token in so many ends the answer."""
_Slots = npt.NDArray[np.int64]


def fake_next_token(context: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """Return the token that follows a context: a printable ASCII byte, or the end of the answer once in 64."""
    data = np.ascontiguousarray(context, dtype="<i4").tobytes()
    number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    if number % _ONE_IN == 0:
        return EOS_ID
    return _FIRST_PRINTABLE + number // _ONE_IN % _PRINTABLES


class WrongBlock(Exception):
    """A row read back another position than its table says: its block was given to somebody else, or never filled."""


class FakeExecutor:
    """A pool of (token, position) and a hash instead of a model, which is always certain of its token.

    Sampling parameters change nothing, but that no answer ends before its least length, and that a grammar is followed:
    a token that it does not allow gives way to one that it does.
    """

    vocabulary = VOCABULARY

    def __init__(
        self, blocks: int, *, step_s: float = 0.0, clock: Clock = monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.size = WorkerSize(blocks, BLOCK_TOKENS, FAKE_MAX_MODEL_LEN)
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._grammars = Grammars(fake_tokenizer_files(), VOCABULARY)
        self.forget()

    def forget(self) -> None:
        """Empty the pool."""
        slots = self.size.blocks * self.size.block_tokens
        self._tokens = np.full(slots, -1, dtype=np.int32)
        self._positions = np.full(slots, -1, dtype=np.int32)

    def expect(self, grammar: str) -> None:
        """Begin to make a grammar aside."""
        self._grammars.expect(grammar)

    def execute(self, batch: Batch) -> tuple[Outcome, ...]:
        """Run a batch that awaits nothing. Raises WrongBlock."""
        return self.prepare(batch)(())

    def prepare(self, batch: Batch) -> Step:
        """Find the slots of all rows. The step raises WrongBlock."""
        return partial(self._run, batch, [self._slots(row) for row in batch], guided_of(batch))

    def _run(
        self, batch: Batch, slots: Sequence[_Slots], guided: Sequence[Guided], before: Sequence[Outcome]
    ) -> tuple[Outcome, ...]:
        """Write all rows, then read each drawing row's whole context back."""
        begun_s = self._clock()
        for row, of_row in zip(batch, slots, strict=True):
            self._tokens[of_row[row.start :]] = known_ids(row, before)
            self._positions[of_row[row.start :]] = range(row.start, row.end)
        masks, drawing = self._grammars.masks(guided, before), 0
        outcomes: list[Outcome] = []
        for row, of_row in zip(batch, slots, strict=True):
            if row.has_outcome:
                outcomes.append(self._next(row, of_row, masks.get(drawing) if row.draw else None))
            drawing += row.draw is not None
        self._sleep_until(begun_s + self._step_s)
        return tuple(outcomes)

    def _slots(self, row: Row) -> _Slots:
        table = np.asarray(row.table, dtype=np.int64)
        slots = table[:, None] * self.size.block_tokens + np.arange(self.size.block_tokens)
        return slots.reshape(-1)[: row.end]

    def _next(self, row: Row, slots: _Slots, mask: Allowed | DrawFailed | None) -> Outcome:
        found = self._positions[slots]
        wrong = np.flatnonzero(found != np.arange(row.end))
        if wrong.size:
            at = int(wrong[0])
            raise WrongBlock(f"request {row.request}: position {at} reads back position {int(found[at])}")
        context = self._tokens[slots]
        if isinstance(mask, DrawFailed):
            return mask
        drawn = None if row.draw is None else _drawn(fake_next_token(context), row.draw, mask)
        if row.scores is not None:
            return Scored(_scored(row.scores, context), drawn)
        assert drawn is not None, "nothing else is asked of a row"  # noqa: S101 - for the type checker
        return drawn

    def _sleep_until(self, end_s: float) -> None:
        left_s = end_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)


def _scored(scores: Scores, context: npt.NDArray[np.int32]) -> tuple[Logprobs, ...]:
    told = []
    for place, token_id in enumerate(scores.token_ids, start=scores.first):
        token = fake_next_token(context[:place])
        likeliest = (Ranked(token, 0.0),)[: scores.most]
        told.append(Logprobs(0.0 if token == token_id else LEAST, likeliest))
    return tuple(told)


def _drawn(token: int, draw: Draw, allowed: Allowed | None) -> int | Drawn:
    if draw.history is not None and draw.history.output_tokens < draw.sampling.min_tokens:
        ending_ids = draw.history.ending_ids
        token = token if token not in ending_ids else _FIRST_PRINTABLE
        allowed = None if allowed is None else without(allowed, ending_ids)
    if allowed is not None and not allowed[token]:
        instead = np.flatnonzero(allowed)
        token = int(instead[token % len(instead)])
    if draw.sampling.logprobs is None:
        return token
    return Drawn(token, Logprobs(0.0, (Ranked(token, 0.0),)[: draw.sampling.logprobs]))


def load_fake(settings: WorkerSettings, _progress: Progress) -> Loaded:
    """Return the fake executor with its tokenizer; neither network nor torch is needed."""
    blocks = max((settings.kv_tokens or DEFAULT_KV_TOKENS) // BLOCK_TOKENS, 1)
    try:
        executor = FakeExecutor(blocks, step_s=settings.fake_step_ms / 1000)
    except MemoryError as error:
        raise StartupError(f"--kv-tokens {settings.kv_tokens}: there is no memory for so many positions") from error
    return Loaded(executor, fake_tokenizer_files(), "none")
