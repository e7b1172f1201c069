"""A worker made of counters: it executes steps in order, knows when each ends, and forgets everything when it dies."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shared.ids import RequestId
from shared.scheduling.planner import Outcome
from shared.scheduling.state import WorkerView
from shared.scheduling.step import Step
from shared.scheduling.timing import StepTimes
from shared.simulation.model import StepLoad, StepTimeModel
from shared.simulation.records import Arrival


@dataclass(slots=True, eq=False)
class Track:
    """One request on its way. ``drawn`` counts tokens of steps that were begun, ``token_times_s`` those delivered."""

    id: RequestId
    index: int
    arrival: Arrival
    goes_on: Outcome
    """What most of its slices come to: always the same, so it is made once per attempt."""
    attempt: int = 1
    drawn: int = 0
    first_scheduled_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    refused: bool = False

    @property
    def has_ended(self) -> bool:
        """True if its last token has been drawn, read or not."""
        return self.drawn >= self.arrival.output_tokens

    def lose(self) -> None:
        """Begin another attempt with the tokens that were delivered."""
        self.attempt += 1
        self.drawn = len(self.token_times_s)
        self.goes_on = Outcome(self.id, self.attempt, ended=False)


@dataclass(frozen=True, slots=True)
class Executed:
    """What a step came to, known when it begins: time and tokens do not depend on anything that happens meanwhile."""

    load: StepLoad
    padding_tokens: int
    outcomes: list[Outcome]
    sampled: list[Track]
    ended: list[Track]
    """Who is answered when its result is read."""


def execute(step: Step, tracks: dict[RequestId, Track]) -> Executed:
    """Run a step: count what it computes and draw its tokens. Who ended in an earlier step is skipped."""
    rows = reads = tokens = prefill_reads = pairs = 0
    outcomes: list[Outcome] = []
    sampled: list[Track] = []
    ended: list[Track] = []
    for slice_ in step.slices:
        track = tracks[slice_.request]
        if track.drawn >= track.arrival.output_tokens:
            outcomes.append(track.goes_on)
            continue
        count, start = slice_.count, slice_.start
        tokens += count
        if slice_.decodes:
            rows += 1
            reads += start + 1
        else:
            prefill_reads += start
            pairs += count * start + count * (count + 1) // 2
        if slice_.samples:
            track.drawn += 1
            sampled.append(track)
            if track.drawn >= track.arrival.output_tokens:
                ended.append(track)
                outcomes.append(Outcome(track.id, track.attempt, ended=True))
                continue
        outcomes.append(track.goes_on)
    return Executed(StepLoad(tokens, rows, reads, prefill_reads, pairs), 0, outcomes, sampled, ended)


class Rectangle:
    """A static batch as engines without ragged batches compute it: rows stay until the last one ends (padding)."""

    def __init__(self) -> None:
        self._positions: dict[RequestId, int] = {}
        """Positions of each row, those that it was padded with after its end included."""
        self._ended: list[Track] = []

    def padded(self, step: Step, executed: Executed) -> Executed:
        """Return what a step costs as a rectangle of all rows, each as wide as the widest, ended ones included.

        Nobody is answered before the last one ends.
        """
        if not step.slices:
            return executed
        widths = {slice_.request: slice_.count for slice_ in step.slices}
        self._positions.update({slice_.request: slice_.start + slice_.count for slice_ in step.slices})
        missing = self._positions.keys() - widths.keys()
        for row in missing:
            self._positions[row] += 1
        padding = padding_tokens([*widths.values(), *(0 for _ in missing)])
        load = replace(
            executed.load,
            tokens=executed.load.tokens + padding,
            decode_rows=executed.load.decode_rows + len(missing),
            decode_read_tokens=executed.load.decode_read_tokens + sum(self._positions[row] for row in missing),
        )
        return replace(executed, load=load, padding_tokens=padding, ended=self._return(executed.ended))

    def _return(self, ended: list[Track]) -> list[Track]:
        self._ended += ended
        if len(self._ended) < len(self._positions):
            return []
        returned, self._ended = self._ended, []
        self._positions = {}
        return returned


def padding_tokens(widths: Iterable[int]) -> int:
    """Return the tokens that fill rows of these widths up to a rectangle."""
    rows = list(widths)
    return max(rows) * len(rows) - sum(rows)


class Pipeline:
    """Stages that a batch passes in order, each taking an equal share of its time, each holding one batch at a time."""

    def __init__(self, stages: int) -> None:
        self._free_s = [0.0] * stages

    def run(self, ready_s: float, seconds: float) -> tuple[float, float]:
        """Return when a batch that is ready then begins and ends, and keep its stages until it has passed them."""
        share_s = seconds / len(self._free_s)
        begun_s = at_s = max(ready_s, self._free_s[0])
        for stage, free_s in enumerate(self._free_s):
            at_s = max(at_s, free_s) + share_s
            self._free_s[stage] = at_s
        return begun_s, at_s


@dataclass(slots=True, eq=False)
class Host:
    """One worker as both sides see it: what the leader keeps of it, and the machine that executes."""

    number: int
    view: WorkerView
    pipeline: Pipeline
    times: StepTimes = field(default_factory=StepTimes)
    rectangle: Rectangle | None = None
    running_since_s: float = 0.0
    """When its oldest plan in flight began to run, as the leader believes."""
    is_idle: bool = False
    """Its next plan would have been empty; there is no other before something happens."""
    died_s: float | None = None
    is_dropped: bool = False
    block_seconds: float = 0.0
    most_blocks: int = 0
    counted_s: float = 0.0

    def execute(self, step: Step, tracks: dict[RequestId, Track], model: StepTimeModel) -> tuple[Executed, float]:
        """Run a step and return what it came to and its seconds."""
        executed = execute(step, tracks)
        if self.rectangle is not None:
            executed = self.rectangle.padded(step, executed)
        return executed, model.step_ms(executed.load) / 1000

    def count_blocks(self, now_s: float) -> None:
        """Take note of the blocks held until now, before that changes."""
        used = self.view.pool.used
        self.block_seconds += used * (now_s - self.counted_s)
        self.most_blocks = max(self.most_blocks, used)
        self.counted_s = now_s
