"""What `slipstream up` starts: a command and an environment for each service."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from services.supervision import Part
from shared.protocol import names
from shared.runtime.settings import UpSettings

_DISTRIBUTION = "slipstream-serving"
_ROOT = Path(__file__).resolve().parent.parent


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def threads_per_worker(settings: UpSettings) -> int:
    """Return the threads of one worker: an equal share of the cores unless told otherwise."""
    return settings.threads or max(1, cores() // settings.workers)


def service_parts(settings: UpSettings, *, redis_url: str, port: int) -> tuple[Part, tuple[Part, ...]]:
    """Return the gateway, and the scheduler with the workers: they are stopped one after the other."""
    share = settings.memory_share if "memory_share" in settings.model_fields_set else settings.workers
    given = {"redis_url": redis_url, "port": port, "threads": threads_per_worker(settings), "memory_share": share}
    environment = _environment(settings.model_copy(update=given))
    workers = ["worker"] if settings.workers == 1 else [f"worker {number + 1}" for number in range(settings.workers)]
    inner = [_part("scheduler", "scheduler", environment), *(_part(name, "worker", environment) for name in workers)]
    return _part("gateway", "gateway", environment | _secrets(settings)), tuple(inner)


def _part(name: str, kind: names.Kind, environment: Mapping[str, str]) -> Part:
    # -P: a folder called "services" where the user stands must not be taken for ours
    command = (sys.executable, *(("-P",) if _is_installed() else ()), "-m", "services.cli", kind)
    return Part(name, command, environment, kind=kind)


def _environment(settings: UpSettings) -> dict[str, str]:
    """Return this process's environment with all settings as variables: complete, and no quoting."""
    ours = {_variable(name): value for name, value in settings.model_dump().items()}
    environment = {name: value for name, value in os.environ.items() if name.upper() not in ours}
    environment |= {
        name: str(value) for name, value in ours.items() if value is not None and not isinstance(value, SecretStr)
    }
    if not _is_installed():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
    return environment


def _secrets(settings: UpSettings) -> dict[str, str]:
    """Return what only the gateway may know, as variables."""
    return {
        _variable(name): value.get_secret_value()
        for name, value in settings.model_dump().items()
        if isinstance(value, SecretStr)
    }


def _variable(name: str) -> str:
    return f"SLIPSTREAM_{name.upper()}"


def _is_installed() -> bool:
    try:
        importlib.metadata.distribution(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return False  # a bare checkout
    return True
