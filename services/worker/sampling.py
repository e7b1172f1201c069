"""Drawing tokens: the whole batch at once, each row as if it were alone.

One uniform number per (seed, position) and the inverse of the cumulative distribution over ids in order, so that a
position that is computed again draws with the same number (DESIGN §4).
"""

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.executor import Draw, DrawFailed, Drawn
from services.worker.grammars import FREE, Masks
from services.worker.sampling_adjust import adjusted, is_adjusted
from services.worker.sampling_chunks import Chunks
from services.worker.sampling_logprobs import logprobs_of
from services.worker.sampling_random import draw_random

NOT_FINITE = DrawFailed("logits that are not finite")

DrawnToken = int | Drawn | DrawFailed


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw], masks: Masks = FREE) -> tuple[DrawnToken, ...]:
    """Return one token for each row of ``[rows, vocabulary]``, within its mask if it has one.

    A row without finite logits, or whose grammar failed, fails alone.
    """
    logits = logits.float()
    chunks = Chunks(logits)
    failed = {index: mask for index, mask in masks.items() if isinstance(mask, DrawFailed)}
    allowed = {index: mask for index, mask in masks.items() if not isinstance(mask, DrawFailed)}
    changed = [i for i, draw in enumerate(draws) if i not in failed and (i in allowed or is_adjusted(draw))]
    plain = sorted(set(range(len(draws))) - {*changed, *failed}) if changed or failed else range(len(draws))
    drawn = dict(zip(plain, _draw(chunks, plain, [draws[index] for index in plain]), strict=True))
    if changed:
        asked = [draws[index] for index in changed]
        copies = Chunks(adjusted(logits[changed], asked, [allowed.get(index) for index in changed]))
        drawn |= zip(changed, _draw(copies, range(len(changed)), asked), strict=True)
    outcomes: list[DrawnToken] = [failed.get(index) or _outcome(drawn[index]) for index in range(len(draws))]
    _tell_logprobs(chunks, draws, outcomes)
    return tuple(outcomes)


def _outcome(token: int | None) -> DrawnToken:
    return NOT_FINITE if token is None else token


def _draw(chunks: Chunks, rows: Sequence[int], draws: Sequence[Draw]) -> list[int | None]:
    """Return one token for each of these rows, None for a row that is not finite."""
    tokens: list[int | None] = [None] * len(rows)
    random = []
    for index, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        if draw.sampling.temperature > 0:
            random.append(index)
            continue
        logits = chunks.row(row)
        token = int(logits.argmax())  # the first of equals, and of NaN before all others
        tokens[index] = token if np.isfinite(logits[token]) else None
    if random:
        # NaN and +inf reach the peak, and a row of -inf alone has nothing to draw from
        finite = np.isfinite(chunks.peaks(np.array([rows[index] for index in random])))
        good = [index for index, is_finite in zip(random, finite, strict=True) if is_finite]
        found = draw_random(chunks, [rows[index] for index in good], [draws[index] for index in good])
        for index, token in zip(good, found, strict=True):
            tokens[index] = token
    return tokens


def _tell_logprobs(chunks: Chunks, draws: Sequence[Draw], outcomes: list[DrawnToken]) -> None:
    rows: list[int] = []
    tokens: list[int] = []
    most: list[int] = []
    for row, (draw, outcome) in enumerate(zip(draws, outcomes, strict=True)):
        if draw.sampling.logprobs is not None and isinstance(outcome, int):
            rows.append(row)
            tokens.append(outcome)
            most.append(draw.sampling.logprobs)
    if rows:
        for row, token, told in zip(rows, tokens, logprobs_of(chunks, rows, tokens, most), strict=True):
            outcomes[row] = Drawn(token, told)
