"""The flags of ``loadgen calibrate``."""

from pathlib import Path

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, SecretStr

from loadgen.settings import BaseUrl


class CalibrateSettings(BaseModel, frozen=True):
    """Measure how long an idle server's steps take, and write a model that `loadgen simulate --model FILE` reads.

    Nothing else may use the server or its machine meanwhile. Prompts are fresh token ids, so that no cache helps.
    Exit status: 0, 2 if nothing that makes sense could be measured (then nothing is written), 130 if interrupted.
    """

    url: BaseUrl = Field(default="http://127.0.0.1:8000", description="the server, without /v1")
    model: str | None = Field(
        default=None, min_length=1, description="model to ask for (default: the first of /v1/models)"
    )
    api_key: SecretStr | None = Field(default=None, description="sent as a bearer token, never written to the result")
    step_tokens: PositiveInt = Field(
        default=512, ge=16, le=1_000_000, description="the server's --max-num-batched-tokens: longer prompts take steps"
    )
    kv_tokens: PositiveInt | None = Field(
        default=None, description="the server's KV memory in tokens, for the file: no client can measure it"
    )
    max_streams: PositiveInt = Field(
        default=64, ge=3, le=1024, description="measure decode batches of 1, 2, 4, ... up to so many streams"
    )
    budget_s: PositiveFloat = Field(
        default=90.0, le=3600, description="begin no measurement that would end later; what is left out is said"
    )
    out: Path = Field(
        default=Path("step-times.json"), description="where the model is written, replacing what is there"
    )
