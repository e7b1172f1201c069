"""The command ``slipstream``. A service is imported inside its command: help is fast, the gateway never sees torch."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_settings import BaseSettings

from services.flags import EXIT_USAGE, UsageError, parse
from shared.errors import StartupError
from shared.runtime import logging, process, threads
from shared.runtime.settings import (
    Common,
    GatewaySettings,
    HealthcheckSettings,
    SchedulerSettings,
    UpSettings,
    WorkerSettings,
)

_DISTRIBUTION = "slipstream-serving"
_EXIT_INTERRUPTED = 130
_OUR_PACKAGES = ("services", "shared")


@dataclass(frozen=True, slots=True)
class Command:
    """A word after ``slipstream``: what it promises, the settings it takes, what runs it, what must be installed."""

    promise: str
    settings: type[Common]
    run: Callable[[Any], int]
    extra: str


def main() -> None:
    """Run the command that stands on the command line and exit with its status."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in {"-h", "--help", "help"}:
        sys.stdout.write(_overview())
    elif name == "--version":
        sys.stdout.write(f"slipstream {_version()}\n")
    elif name in COMMANDS:
        threads.end_process(_run(name, COMMANDS[name], arguments))
    else:
        _say(f"unknown command {name!r}: there are {', '.join(COMMANDS)}")
        sys.exit(EXIT_USAGE)


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    try:
        settings = parse(command.settings, name, arguments)
        logging.configure(name, settings.log_level)
        return command.run(settings)
    except UsageError as error:
        _say(f"{error} (slipstream {name} --help lists all flags)")
        return EXIT_USAGE
    except StartupError as error:
        _say(str(error))
        return process.EXIT_CANNOT_START
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OUR_PACKAGES:
            raise
        _say(f"{name} needs the package {error.name!r}: pip install '.[{command.extra}]' where Slipstream's files are")
        return process.EXIT_CANNOT_START
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _service(kind: str) -> Callable[[BaseSettings], int]:
    def run(settings: BaseSettings) -> int:
        serve = _late(f"services.{kind}.service", "serve")
        return process.run(lambda stopping: serve(settings, stopping))

    return run


def _function(module: str, name: str) -> Callable[[BaseSettings], int]:
    return lambda settings: int(_late(module, name)(settings))


def _late(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


COMMANDS = {
    "up": Command(
        "everything on one machine, with an embedded Valkey", UpSettings, _function("services.local", "up"), "all"
    ),
    "gateway": Command("HTTP in, tokens out", GatewaySettings, _service("gateway"), "gateway"),
    "scheduler": Command(
        "decides what runs in the next iteration", SchedulerSettings, _service("scheduler"), "scheduler"
    ),
    "worker": Command("runs the model", WorkerSettings, _service("worker"), "worker"),
    "convert": Command(
        "fetch and convert a model now", WorkerSettings, _function("services.worker.convert", "convert"), "worker"
    ),
    "healthcheck": Command(
        "ask whether this host's gateway, scheduler or worker is alive",
        HealthcheckSettings,
        _function("services.healthcheck", "healthcheck"),
        "all",
    ),
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {command.promise}" for name, command in COMMANDS.items())
    return (
        "usage: slipstream COMMAND [--FLAG VALUE]…\n\n"
        "Serve a large language model with continuous batching.\n\n"
        f"commands:\n{lines}\n\n"
        "slipstream COMMAND --help lists the flags of a command. Each flag is also a variable,\n"
        "--max-queue for example SLIPSTREAM_MAX_QUEUE; the flag wins. slipstream --version says which this is.\n"
    )


def _version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: a bare checkout)"


def _say(sentence: str) -> None:
    sys.stderr.write(f"slipstream: {sentence}\n")


if __name__ == "__main__":
    main()
