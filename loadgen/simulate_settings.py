"""The flags of ``loadgen simulate``."""

from collections.abc import Callable, Collection
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from loadgen.settings import MAX_REQUESTS
from loadgen.simulate_lengths import parse_length
from loadgen.step_times import bundled_models
from loadgen.traces import Reshape
from shared.scheduling.orders import ORDERS
from shared.scheduling.policies import POLICIES
from shared.simulation.core import KV_NAMES

LARGEST_KV_TOKENS = 1_000_000_000
LARGEST_RATE = 1_000_000


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise ValueError(f"no {text!r}: one of {', '.join(names)}")
        return text

    return check


def _several_of(names: Collection[str]) -> Callable[[str], str]:
    def check(text: str) -> str:
        for part in _listed(text):
            _one_of(names)(part)
        if len(set(_listed(text))) < len(_listed(text)):
            raise ValueError(f"{text!r} names one twice")
        return text

    return check


def _rates(text: str) -> str:
    try:
        rates = [float(part) for part in _listed(text)]
    except ValueError:
        raise ValueError(f"{text!r} is not one or several numbers, like 0.5,1,2") from None
    if not all(0 < rate <= LARGEST_RATE for rate in rates) or len(set(rates)) < len(rates):
        raise ValueError(f"{text!r} must be different rates above 0 and up to {LARGEST_RATE:,} a second")
    return text


def _length(text: str) -> str:
    parse_length(text)
    return text


def _scale(text: str) -> str:
    try:
        Reshape(scale_lengths=Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{text!r}: {error}") from error
    return text


LengthText = Annotated[str, AfterValidator(_length)]


class SimulateSettings(BaseModel, frozen=True):
    """Serve a load in virtual time, with the very planner that the scheduler runs and step times from a model.

    Prints a table, writes simulation.json and latency.png; the same flags give the same bytes. Several policies or
    rates, separated by commas, are run one after another on the same requests.
    Exit status: 0, 2 for flags that make no sense, 130 if interrupted.
    """

    model: str = Field(
        default="sarathi-yi-34b",
        description=f"step times: {', '.join(bundled_models())}, or a file (as loadgen calibrate writes)",
    )
    policy: Annotated[str, AfterValidator(_several_of(POLICIES))] = Field(
        default="sarathi", description=f"one or several of {', '.join(POLICIES)}"
    )
    queue: Annotated[str, AfterValidator(_one_of(ORDERS))] = Field(
        default="fcfs", description=f"queue order: {', '.join(ORDERS)}"
    )
    kv: Annotated[str, AfterValidator(_one_of(KV_NAMES))] | None = Field(
        default=None,
        description=f"KV memory: {', '.join(KV_NAMES)} (default: reserve for static and orca, else paged)",
    )

    rate: Annotated[str, AfterValidator(_rates)] = Field(
        default="1", description="requests per second, or several rates for a sweep: 0.5,1,2"
    )
    arrivals: Literal["poisson", "at-once"] = Field(default="poisson", description="how they come; at-once has no rate")
    requests: PositiveInt = Field(default=1000, le=MAX_REQUESTS, description="how many there are")
    prompt_tokens: LengthText = Field(
        default="128", description="length of prompts: N, LOW-HIGH (uniform), or lognormal:P50:P90[:MOST]"
    )
    output_tokens: LengthText = Field(default="64", description="length of answers, likewise")
    lengths: Path | None = Field(
        default=None, description="draw both lengths from the rows of this file (sharegpt, Azure, Mooncake)"
    )
    trace: Path | None = Field(
        default=None, description="replay this file instead, at its own times, with the prefixes it shares"
    )
    scale_lengths: Annotated[str, AfterValidator(_scale)] = Field(
        default="1", description="lengths of --trace times this: 1/32 makes its hash blocks 16 tokens"
    )
    time_scale: float = Field(default=1.0, gt=0, le=1e9, description="times of --trace times this: 2 is half as fast")
    max_tokens: PositiveInt | None = Field(
        default=None, description="what each request asks for at most (default: exactly the answer it will get)"
    )
    tenants: PositiveInt = Field(default=1, le=10_000, description="requests belong to so many tenants in turn")

    workers: PositiveInt = Field(default=1, le=10_000, description="workers in the pool")
    plan_depth: int = Field(default=2, ge=1, le=4, description="plans in flight per worker")
    max_num_batched_tokens: PositiveInt = Field(default=512, description="tokens that one step may process")
    max_num_seqs: PositiveInt = Field(default=64, description="requests that may hold KV blocks at once on a worker")
    max_model_len: PositiveInt | None = Field(
        default=None, description="longest prompt and answer served (default: the longest request there is)"
    )
    kv_tokens: int | None = Field(
        default=None,
        ge=16,
        le=LARGEST_KV_TOKENS,
        description="positions of a worker's KV memory (default: the model's)",
    )
    long_prefill_tokens: NonNegativeInt = Field(
        default=0, description="tokens of a step that long prompts share while shorter ones wait; 0: no such cap"
    )
    tile_tokens: PositiveInt = Field(default=1, description="a full step feeds a multiple of this")
    stages: PositiveInt | None = Field(
        default=None,
        le=64,
        description="orca: batches in flight on a pipeline of so many stages (default: the model's)",
    )
    padded: bool = Field(
        default=False, description="static: rows that have ended are computed, and answered, with the longest"
    )
    round_trip_ms: NonNegativeFloat = Field(
        default=0.5, le=10_000, description="from a result to the plan made of it, as Redis takes it; 0 in the papers"
    )

    seed: NonNegativeInt = Field(default=0, description="of arrivals and lengths")
    out: Path = Field(default=Path("simulation"), description="folder for the files, made if it is not there")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.trace is not None and self.lengths is not None:
            raise ValueError("--trace and --lengths exclude each other: a trace has lengths of its own")
        if self.trace is not None and self.arrivals == "at-once":
            raise ValueError("--trace and --arrivals at-once exclude each other: a trace has times of its own")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError("--max-num-seqs decodes must fit into --max-num-batched-tokens")
        if self.padded and "static" not in self.policies:
            raise ValueError("--padded is about static, which --policy does not name")
        if (self.stages or 1) > 1 and "orca" not in self.policies:
            raise ValueError("--stages is about orca, which --policy does not name")
        return self

    @property
    def policies(self) -> list[str]:
        """The policies to run."""
        return _listed(self.policy)

    @property
    def rates(self) -> list[float | None]:
        """The rates to run; None for those that have no rate of their own."""
        if self.trace is not None or self.arrivals == "at-once":
            return [None]
        return [float(part) for part in _listed(self.rate)]

    @property
    def reshape(self) -> Reshape:
        """What is done to a trace."""
        return Reshape(time_scale=self.time_scale, scale_lengths=Fraction(self.scale_lengths))
