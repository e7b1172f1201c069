"""``loadgen COMMAND``: reads flags and runs the command."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliSubCommand,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    get_subcommand,
)

from loadgen.calibrate import calibrate
from loadgen.calibrate_settings import CalibrateSettings
from loadgen.run import EXIT_CANNOT_START, run
from loadgen.server import CannotStart
from loadgen.settings import RunSettings
from loadgen.simulate import simulate
from loadgen.simulate_settings import SimulateSettings


class Loadgen(BaseSettings):
    """Put load on a server with an OpenAI-compatible API and measure what its users would see."""

    model_config = SettingsConfigDict(
        cli_prog_name="loadgen", cli_kebab_case=True, cli_implicit_flags=True, frozen=True
    )

    run: CliSubCommand[RunSettings] = Field(description="send requests and measure the answers")
    calibrate: CliSubCommand[CalibrateSettings] = Field(description="measure a server's steps for the simulator")
    simulate: CliSubCommand[SimulateSettings] = Field(description="serve a load in virtual time, by a model")

    @classmethod
    def settings_customise_sources(  # type: ignore[override] # the sources that are not wanted need no names
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic-settings calls it with these names
        init_settings: PydanticBaseSettingsSource,
        **_others: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take flags only: a variable of the environment must not change what is measured."""
        return (init_settings,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        return _run_command(sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        return _refuse("; ".join(map(_sentence, error.errors())))
    except CannotStart as error:
        return _refuse(str(error))


def _run_command(arguments: Sequence[str]) -> int:
    flags: CliSettingsSource[Any] = CliSettingsSource(
        Loadgen, cli_parse_args=[*arguments] or ["--help"], cli_hide_none_type=True, formatter_class=_HelpFormatter
    )
    loadgen = Loadgen(_cli_settings_source=flags)  # type: ignore[call-arg] # `run` comes from the flags
    match get_subcommand(loadgen):
        case RunSettings() as settings:
            return run(settings)
        case CalibrateSettings() as settings:
            return calibrate(settings)
        case SimulateSettings() as settings:
            return simulate(settings)
        case other:
            raise AssertionError(f"a command that nobody runs: {other!r}")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help as the docstrings are written. A flag that is off by default has said what that means."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(inspect.cleandoc(text), width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and action.help.replace(" (default: null)", "")


def _sentence(error: ErrorDetails) -> str:
    flag = "-".join(str(part) for part in error["loc"][1:]).replace("_", "-")
    message = error["msg"].removeprefix("Value error, ")
    return f"--{flag}: {message}" if flag else message


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"loadgen: {sentence}\n")
    return EXIT_CANNOT_START
