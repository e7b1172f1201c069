"""The flags of each command, declared once: types, defaults, help, and what must fit together."""

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    model_validator,
)

from loadgen.client import Target
from loadgen.goodput import Bounds
from loadgen.lengths import Span
from loadgen.prompts import Endpoint, Workload

DEFAULT_CONCURRENCY = 8
MAX_REQUESTS = 1_000_000


def _span(text: str) -> str:
    Span.parse(text)
    return text


def _base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_fit = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # what stands for a port is none, or an address is not one
        is_fit = False
    if not is_fit:
        raise ValueError(f"{text!r} is not like http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


SpanText = Annotated[str, AfterValidator(_span)]
BaseUrl = Annotated[str, AfterValidator(_base_url)]


class RunSettings(BaseModel, frozen=True):
    """Send requests to a server with an OpenAI-compatible API and measure what its users would see.

    Either --rate or --concurrency says how the load is made; --requests and --duration-s both bound it.
    Exit status: 0, 1 if a request failed, 2 for wrong flags or a server out of reach, 130 if interrupted.
    """

    url: BaseUrl = Field(default="http://127.0.0.1:8000", description="the server, without /v1")
    model: str | None = Field(
        default=None, min_length=1, description="model to ask for (default: the first of /v1/models)"
    )
    endpoint: Endpoint = Field(default="completions", description="completions sends token ids, chat sends words")
    api_key: SecretStr | None = Field(default=None, description="sent as a bearer token, never written to the result")

    rate: PositiveFloat | None = Field(
        default=None, description="open loop: requests per second at Poisson arrivals, however long answers take"
    )
    concurrency: PositiveInt | None = Field(
        default=None, le=10_000, description=f"closed loop: requests at a time (default: {DEFAULT_CONCURRENCY})"
    )
    requests: PositiveInt = Field(default=100, le=MAX_REQUESTS, description="send no more than these")
    duration_s: PositiveFloat = Field(
        default=60.0, le=86_400, description="send none after so many seconds; finish those sent"
    )
    warmup: NonNegativeInt = Field(default=0, le=10_000, description="requests sent before, and not measured")

    prompt_tokens: SpanText = Field(default="128", description="length of prompts: N, or LOW-HIGH for uniform lengths")
    output_tokens: SpanText = Field(default="64", description="max_tokens of each request: N or LOW-HIGH")
    ignore_eos: bool = Field(
        default=True, description="ask for answers of full length (an extension that OpenAI refuses)"
    )
    continuous_usage: bool = Field(
        default=True,
        description="ask for a token count in each chunk (an extension, needed where chunks hold several tokens)",
    )
    temperature: NonNegativeFloat = Field(default=0.0, description="sampling temperature of the server")
    seed: NonNegativeInt | None = Field(
        default=None,
        description="of arrivals, lengths and prompts (default: a new one each run, so that no cache helps)",
    )

    timeout_s: PositiveFloat = Field(default=120.0, le=86_400, description="a request not finished by then has failed")
    cancel_share: float = Field(
        default=0.0, ge=0, le=1, description="share of clients that leave after the first token"
    )
    goodput_ttft_ms: PositiveFloat | None = Field(
        default=None, description="a good request has its first token so soon, from the moment it was to be sent"
    )
    goodput_tbt_ms: PositiveFloat | None = Field(
        default=None, description="a good request waits no longer than this for any later token"
    )
    goodput_tpot_ms: PositiveFloat | None = Field(
        default=None, description="a good request waits no longer than this for a later token on average"
    )
    out: Path = Field(
        default=Path("loadgen-result.json"), description="where the result is written, replacing what is there"
    )

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> Self:
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("--rate and --concurrency exclude each other: an open loop does not wait for answers")
        return self

    @property
    def sessions(self) -> int:
        """Requests at a time in a closed loop."""
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def workload(self) -> Workload:
        """What is asked."""
        return Workload(
            self.endpoint, Span.parse(self.prompt_tokens), Span.parse(self.output_tokens), self.cancel_share
        )

    @property
    def bounds(self) -> Bounds | None:
        """What makes a request good, in seconds; None if nothing was asked."""
        limits_ms = self.goodput_ttft_ms, self.goodput_tbt_ms, self.goodput_tpot_ms
        if all(limit_ms is None for limit_ms in limits_ms):
            return None
        return Bounds(*(None if limit_ms is None else limit_ms / 1000 for limit_ms in limits_ms))

    def target(self, model: str) -> Target:
        """Return where requests for `model` go."""
        return Target(
            url=self.url,
            model=model,
            endpoint=self.endpoint,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            continuous_usage=self.continuous_usage,
            timeout_s=self.timeout_s,
        )
