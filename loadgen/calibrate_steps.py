"""Steps, as far as a client can tell them from the moments at which tokens came."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from loadgen.client import Record
from loadgen.measure import Arrival, arrivals_of

MIN_STEPS = 5
"""How many steps must be seen for their median to be believed."""


class LeftOut(Exception):
    """A point cannot be measured here; the text says why."""


def tokens_of(record: Record) -> list[Arrival]:
    """Return when a request's tokens came. Raises `LeftOut` if it failed or that cannot be told."""
    if record.failure is not None:
        raise LeftOut(f"{record.failure.name}: {record.failure.message}")
    source, arrivals = arrivals_of(record.answer)
    if source == "unknown" or not arrivals:
        raise LeftOut("chunks came with an unknown number of tokens")
    return arrivals


def step_while_all_run(streams: Sequence[Sequence[Arrival]], prompt_tokens: int) -> tuple[float, float]:
    """Return the median seconds from token to token, and the positions read, while every stream runs.

    All run from the moment when the last has its first token until the first has its last. Raises `LeftOut` if that
    is hardly ever.
    """
    begins_s, ends_s = _all_run(streams)
    gaps_s: list[float] = []
    positions: list[int] = []
    for stream in streams:
        had = 0
        for former, later in pairwise(stream):
            had += former.tokens
            if former.at_s >= begins_s and later.at_s <= ends_s:
                # a chunk of several tokens stands for as many steps
                gaps_s += [(later.at_s - former.at_s) / later.tokens] * later.tokens
                positions += range(prompt_tokens + had, prompt_tokens + had + later.tokens)
    if len(gaps_s) < MIN_STEPS * len(streams):
        raise LeftOut(f"the server hardly ever ran {len(streams)} at once")
    return float(np.median(gaps_s)), float(np.mean(positions))


def step_with_a_prompt(
    streams: Sequence[Sequence[Arrival]], joined_s: Sequence[tuple[float, float]], prompt_tokens: int
) -> tuple[float, float]:
    """Return the median seconds of the steps that a prompt was in, and the positions that each stream read.

    `joined_s` has the moments when prompts were sent and got their only token, at about which the streams got theirs.
    Raises `LeftOut` if none joined while every stream ran.
    """
    begins_s, ends_s = _all_run(streams)
    steps_s: list[float] = []
    positions: list[int] = []
    for sent_s, first_token_s in joined_s:
        if not begins_s <= sent_s < first_token_s < ends_s:
            continue
        for stream in streams:
            index = min(range(1, len(stream)), key=partial(_distance_s, stream, first_token_s))
            if stream[index].tokens == 1:  # what came with the step before or after is not a step's time
                steps_s.append(stream[index].at_s - stream[index - 1].at_s)
                positions.append(prompt_tokens + sum(arrival.tokens for arrival in stream[:index]))
    if not steps_s:
        raise LeftOut("no prompt was seen to join while all streams ran")
    return float(np.median(steps_s)), float(np.mean(positions))


def _all_run(streams: Sequence[Sequence[Arrival]]) -> tuple[float, float]:
    return max(stream[0].at_s for stream in streams), min(stream[-1].at_s for stream in streams)


def _distance_s(stream: Sequence[Arrival], moment_s: float, index: int) -> float:
    return abs(stream[index].at_s - moment_s)
