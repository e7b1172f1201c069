"""What a comparison of systems is made of: figures of single runs, their medians, and the ratios of those."""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OURS = "slipstream"
_ENGINE_LINE = re.compile(r"^(\w+) +batch +(\d+): decode step +([\d.]+) ms, +(\d+) tok/s$", re.MULTILINE)
_HEAD = (
    "| peer | streams | rounds | tok/s, theirs | ours | ours / theirs (rounds)"
    " | step ms, theirs | ours | ours / theirs | ms per token, theirs | ours | ours / theirs |\n" + "|---" * 12 + "|"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One system at so many streams in one round, and whom it is compared with.

    ``step_ms`` is the median decode step: in process as the peer tells it, over HTTP the median gap between two pieces
    of a stream. ``per_token_ms`` is the median stream's time per output token after its first, None in process.
    """

    peer: str
    system: str
    round: int
    streams: int
    tokens_per_s: float
    step_ms: float
    per_token_ms: float | None = None
    first_ms: float | None = None
    client_share: float | None = None
    """Of one core, taken by the client that measured."""


@dataclass(frozen=True, slots=True)
class EngineFigure:
    """One line of a peer that runs in process."""

    system: str
    streams: int
    step_ms: float
    tokens_per_s: float

    def at(self, own_tokens: int, wanted_tokens: int) -> float:
        """Return tokens per second if outputs had another length: the tokens more cost a decode step each."""
        own_s = self.streams * own_tokens / self.tokens_per_s
        return self.streams * wanted_tokens / (own_s + (wanted_tokens - own_tokens) * self.step_ms / 1e3)


def read_engine(output: str) -> list[EngineFigure]:
    """Return the figures in what a peer in process printed; all other lines are its own business.

    Of several lines for the same batch the last counts: those before it warmed up.
    """
    found = {
        (name, batch): EngineFigure(name, int(batch), float(step_ms), float(tokens_per_s))
        for name, batch, step_ms, tokens_per_s in _ENGINE_LINE.findall(output)
        if int(tokens_per_s)
    }
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """Ours and theirs, of the rounds that have both."""

    system: str
    streams: int
    theirs: tuple[Figure, ...]
    ours: tuple[Figure, ...]

    @property
    def throughput_ratios(self) -> tuple[float, ...]:
        """Ours / theirs, round by round."""
        return tuple(our.tokens_per_s / their.tokens_per_s for our, their in zip(self.ours, self.theirs, strict=True))

    def medians(self, name: str) -> tuple[float, float] | None:
        """Return the medians of theirs and of ours, None if one of them does not have that figure."""
        values = [[getattr(figure, name) for figure in figures] for figures in (self.theirs, self.ours)]
        if None in values[0] + values[1]:
            return None
        return statistics.median(values[0]), statistics.median(values[1])

    def row(self) -> str:
        """Return a line of the table."""
        ratios = sorted(self.throughput_ratios)
        throughput = _cells(self.medians("tokens_per_s"), 0)
        throughput[-1] += f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        times = _cells(self.medians("step_ms"), 1) + _cells(self.medians("per_token_ms"), 1)
        cells = [self.system, str(self.streams), str(len(self.ours)), *throughput, *times]
        return "| " + " | ".join(cells) + " |"


def _cells(medians: tuple[float, float] | None, digits: int) -> list[str]:
    if medians is None:
        return ["", "", ""]
    theirs, ours = medians
    return [f"{theirs:,.{digits}f}", f"{ours:,.{digits}f}", f"{ours / theirs:.2f}"]


def pairs(figures: Iterable[Figure]) -> list[Pair]:
    """Return ours beside theirs, in the order in which they were measured; what has no counterpart is left out."""
    figures = list(figures)
    ours = {(figure.peer, figure.streams, figure.round): figure for figure in figures if figure.system == OURS}
    theirs: dict[tuple[str, int], list[Figure]] = {}
    for figure in figures:
        if figure.system != OURS and (figure.peer, figure.streams, figure.round) in ours:
            theirs.setdefault((figure.system, figure.streams), []).append(figure)
    return [
        Pair(system, streams, tuple(found), tuple(ours[figure.peer, figure.streams, figure.round] for figure in found))
        for (system, streams), found in theirs.items()
    ]


def table(found: Sequence[Pair]) -> str:
    """Return all pairs as a table."""
    return "\n".join([_HEAD, *(pair.row() for pair in found)])
