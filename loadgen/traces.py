"""Traces as requests to send: rebased to their first request, scaled and cut to what a machine can take."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from loadgen.trace_formats import HASH_BLOCK_TOKENS, BadTrace, TraceRequest, read_rows


@dataclass(frozen=True, slots=True)
class Reshape:
    """What is done to a trace so that a smaller machine can take it: lengths are scaled, then cut.

    `time_scale` 2 plays it half as fast. Scaled lengths are rounded up, so that none becomes zero and a prompt keeps
    as many hash blocks as it had, each smaller: 1/32 makes blocks of 512 tokens blocks of 16.
    """

    time_scale: float = 1.0
    scale_lengths: Fraction = Fraction(1)
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.time_scale <= 0 or self.scale_lengths <= 0:
            raise ValueError("times and lengths are scaled by factors above 0")
        if any(limit is not None and limit < 1 for limit in (self.max_prompt_tokens, self.max_output_tokens)):
            raise ValueError("lengths are cut to 1 token or more")
        if (HASH_BLOCK_TOKENS * self.scale_lengths).denominator != 1:
            raise ValueError(
                f"lengths are scaled so that {HASH_BLOCK_TOKENS} tokens stay whole: 1/2, 1/4, 1/8, …, 2, 3"
            )

    @property
    def block_tokens(self) -> int:
        """How many tokens of a scaled prompt one hash id stands for."""
        return int(HASH_BLOCK_TOKENS * self.scale_lengths)

    def scaled(self, tokens: int) -> int:
        """Return a length as scaled, not cut."""
        return -((-tokens * self.scale_lengths.numerator) // self.scale_lengths.denominator)


@dataclass(slots=True)
class Counts:
    """What became of the rows of one pass. A clipped request had its prompt or its answer cut."""

    rows: int = 0
    requests: int = 0
    without_output: int = 0
    clipped: int = 0

    def __str__(self) -> str:
        """Say it in the sentence that belongs beside every figure made from a trace."""
        return (
            f"{self.requests} of {self.rows} rows, {self.without_output} without output skipped, {self.clipped} clipped"
        )


class Trace:
    """The requests of one file, read as they are asked for; each pass begins anew and counts anew."""

    def __init__(self, path: Path, reshape: Reshape | None = None) -> None:
        self.path = path
        self.reshape = reshape or Reshape()
        self.counts = Counts()

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests in the file's order. Raises `BadTrace`, in the midst too: nothing is read ahead."""
        self.counts = Counts()
        first_s: float | None = None
        last_s = 0.0
        for line, row in read_rows(self.path):
            if row.prompt_tokens == 0:
                raise BadTrace(f"{self.path}, line {line}: a prompt of 0 tokens")
            if row.at_s is not None:
                first_s = row.at_s if first_s is None else first_s
                last_s = self._later(round(row.at_s - first_s, 6), last_s, line)  # no trace is finer
            self.counts.rows += 1
            if row.output_tokens == 0:
                self.counts.without_output += 1
            else:
                self.counts.requests += 1
                yield self._reshaped(row, None if row.at_s is None else last_s)
        if self.counts.rows == 0:
            raise BadTrace(f"{self.path} has no rows")

    def _later(self, at_s: float, last_s: float, line: int) -> float:
        if at_s < last_s:
            raise BadTrace(f"{self.path}, line {line}: earlier than the row above it")
        return at_s

    def _reshaped(self, row: TraceRequest, at_s: float | None) -> TraceRequest:
        how = self.reshape
        prompt_tokens, output_tokens = how.scaled(row.prompt_tokens), how.scaled(row.output_tokens)
        request = TraceRequest(
            at_s=None if at_s is None else at_s * how.time_scale,
            prompt_tokens=min(prompt_tokens, how.max_prompt_tokens or prompt_tokens),
            output_tokens=min(output_tokens, how.max_output_tokens or output_tokens),
        )
        self.counts.clipped += (request.prompt_tokens, request.output_tokens) != (prompt_tokens, output_tokens)
        blocks = -(-request.prompt_tokens // how.block_tokens)
        return request._replace(hash_ids=row.hash_ids[:blocks])
