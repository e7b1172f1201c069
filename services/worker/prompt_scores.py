"""How likely the model found the tokens of prompts: many rows of a step through its head, a few at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from services.worker.executor import Batch, DrawFailed, Outcome, Scored, Scores
from services.worker.sampling import NOT_FINITE, DrawnToken
from services.worker.sampling_chunks import Chunks
from services.worker.sampling_logprobs import logprobs_of
from shared.protocol.messages import Logprobs

ROWS_AT_A_TIME = 64
"""Of 49,152 logits in float32 each they take 12.6 MB; those of a whole chunk of 2,048 would take 403 MB."""

LogitsAt = Callable[[torch.Tensor], torch.Tensor]
"""Given places of a step's batch, returns ``[places, vocabulary]``, good until the next call."""


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a step tells of prompts, one after the other."""

    places: npt.NDArray[np.int64]
    """Where in the ragged batch the tokens lie whose followers are told of."""
    token_ids: Sequence[int]
    most: Sequence[int]

    @classmethod
    def of(cls, batch: Batch, firsts: npt.NDArray[np.integer]) -> "Asked | None":
        """Return what the rows of a batch, which begin at ``firsts``, tell of prompts; None if they tell nothing."""
        asked = [(first, row.scores) for first, row in zip(firsts, batch, strict=True) if row.scores is not None]
        if not asked:
            return None
        places = [np.arange(first, first + len(scores.token_ids)) for first, scores in asked]
        token_ids = chain.from_iterable(scores.token_ids for _, scores in asked)
        most = chain.from_iterable([scores.most] * len(scores.token_ids) for _, scores in asked)
        return cls(np.concatenate(places), list(token_ids), list(most))

    def told(self, logits_at: LogitsAt) -> Iterator[Logprobs]:
        """Yield what is told of each token; a logprob is NaN where the logits are not finite."""
        for first in range(0, len(self.places), ROWS_AT_A_TIME):
            some = slice(first, first + ROWS_AT_A_TIME)
            logits = logits_at(torch.from_numpy(self.places[some])).float()
            yield from logprobs_of(Chunks(logits), range(len(logits)), self.token_ids[some], self.most[some])


def with_scores(batch: Batch, drawn: Sequence[DrawnToken], told: Iterator[Logprobs]) -> tuple[Outcome, ...]:
    """Return the outcomes of a batch from what was drawn and what is told, each in the order of its rows."""
    tokens = iter(drawn)
    outcomes: list[Outcome] = []
    for row in batch:
        token = None if row.draw is None else next(tokens)
        if row.scores is not None:
            outcomes.append(_scored(row.scores, token, told))
        elif token is not None:
            outcomes.append(token)
    return tuple(outcomes)


def _scored(scores: Scores, token: DrawnToken | None, told: Iterator[Logprobs]) -> Scored | DrawFailed:
    logprobs = tuple(next(told) for _ in scores.token_ids)
    if isinstance(token, DrawFailed):
        return token
    if any(math.isnan(one.logprob) for one in logprobs):
        return NOT_FINITE
    return Scored(logprobs, token)


@contextmanager
def layers_run_once(model: torch.nn.Module, layers: torch.nn.Module) -> Iterator[None]:
    """Let a model run its layers at its first call only, and at those that follow its head, on what they gave then.

    So its own code makes the logits, whatever it does to them behind the last product.
    """
    if layers is model:  # its code does not keep the two apart: then all of it runs again
        yield
        return
    run = layers.forward
    kept: list[object] = []

    def once(*args: object, **kwargs: object) -> object:
        if not kept:
            kept.append(run(*args, **kwargs))
        return kept[0]

    before = vars(layers).get("forward")
    layers.forward = once
    try:
        yield
    finally:
        if before is None:
            del layers.forward
        else:
            layers.forward = before
