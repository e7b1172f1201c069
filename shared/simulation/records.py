"""What goes into a simulation and what comes out of it, as plain records. All times are virtual seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.simulation.model import StepTimeModel


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that will come. ``output_tokens`` is how many it generates, ``max_tokens`` how many it asks for."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    prefix: tuple[int, ...] = ()
    """What its prompt's blocks of `Setup.block_tokens` are called, from the first on: equal names, equal contents."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError(f"a request needs a prompt and 1 to max_tokens tokens of output: {self}")


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker dies in the middle of whatever it does. ``worker`` counts from 0; who came back counts on from the last.

    The leader notices ``noticed_after_s`` later and submits what was lost again; ``back_after_s`` after the death an
    empty worker takes its place, if at all.
    """

    at_s: float
    worker: int
    noticed_after_s: float = 3.0
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """The pool that is simulated. ``one_way_s`` is what a plan takes to its worker, and a result or token back.

    ``stages`` > 1: so many batches of different requests are in flight on a worker at once, one per pipeline stage.
    ``padded``: batches are rectangles (static only). Rows that have ended are computed until the last one ends, every
    row is as wide as the widest, and all are answered with the last.
    ``kv`` None: as in the live service, ``reserve`` for static and orca, else ``paged``.
    """

    model: StepTimeModel
    kv_tokens: int
    policy: str = "sarathi"
    queue: str = "fcfs"
    kv: str | None = None
    workers: int = 1
    plan_depth: int = 1
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 1_000_000
    block_tokens: int = 16
    long_prefill_tokens: int = 0
    tile_tokens: int = 1
    stages: int = 1
    padded: bool = False
    one_way_s: float = 0.0

    def __post_init__(self) -> None:
        if self.padded and self.policy != "static":
            raise ValueError(f"only static batches are padded, not those of {self.policy}")
        if self.stages > 1 and self.policy != "orca":
            raise ValueError(f"only orca keeps several batches in flight, not {self.policy}")
        if self.kv_tokens < self.block_tokens:
            raise ValueError(f"KV memory of {self.kv_tokens} positions is less than one block of {self.block_tokens}")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request saw. ``end_s`` is None for one that was refused or never ended."""

    arrival: Arrival
    first_scheduled_s: float | None
    token_times_s: Sequence[float]
    end_s: float | None
    attempts: int
    preemptions: int
    cached_tokens: int
    refused: bool

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times_s[0] - self.arrival.at_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.end_s is None else self.end_s - self.arrival.at_s


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step when its result is read: what it computed, and how the pool stood when it was planned."""

    worker: int
    planned_s: float
    begun_s: float
    ended_s: float
    tokens: int
    padding_tokens: int
    decode_rows: int
    requests: int
    running: int
    waiting: int
    blocks_used: int
    ended: int


@dataclass(frozen=True, slots=True)
class KvUse:
    """Blocks that requests held, over all workers and the whole time, as shares of all there are."""

    mean: float
    peak: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all steps. ``prefill_read_tokens``: positions that later chunks of prompts read again."""

    steps: int
    tokens: int
    padding_tokens: int
    prefill_read_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Result:
    """A whole simulation, requests in order of arrival. ``span_s`` is from the first arrival to the last end."""

    requests: tuple[RequestRecord, ...]
    totals: Totals
    kv: KvUse
    span_s: float

    @property
    def finished(self) -> list[RequestRecord]:
        """Those that ended."""
        return [request for request in self.requests if request.end_s is not None]
