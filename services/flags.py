"""Settings from a command line: flags beat ``SLIPSTREAM_*`` variables; what is wrong with either is one sentence."""

import argparse
import os
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource

EXIT_USAGE = 2
_SHOWN_CHARS = 80

AnySettings = TypeVar("AnySettings", bound=BaseSettings)


class UsageError(Exception):
    """What was asked for cannot be done as it was asked: one sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.replace("unrecognized arguments", "unknown flag"))


def parse(settings: type[AnySettings], command: str, arguments: Sequence[str]) -> AnySettings:
    """Return the settings of a command. Raises `UsageError`; ``--help`` prints and ends the process."""
    groups: dict[str, Any] = {}
    parser = _Parser(prog=f"slipstream {command}", description=settings.__doc__, allow_abbrev=False)

    def add_argument(_: argparse.ArgumentParser, *names: str, **options: Any) -> None:
        title = _declared_by(settings, options.get("dest", names[0]))
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        group.add_argument(*names, **options | {"type": _not_empty, "help": _with_one_default(options["help"])})

    source: CliSettingsSource[AnySettings] = CliSettingsSource(
        settings, root_parser=parser, add_argument_method=add_argument, cli_hide_none_type=True
    )
    try:
        return settings(_cli_settings_source=source(args=list(arguments)))
    except ValidationError as error:
        raise UsageError("; ".join(_sentence(detail, arguments) for detail in error.errors())) from error


def _declared_by(settings: type[BaseSettings], field: str) -> str:
    """Return what the settings class that a field comes from calls itself: the heading of its flags."""
    owner = next(base for base in reversed(settings.__mro__) if field in getattr(base, "__annotations__", {}))
    title = (owner.__doc__ or "").partition(":")[0].rstrip(".")
    return title[:1].lower() + title[1:]


def _not_empty(value: str) -> str:
    """Refuse what would count as not given: an empty variable is one that is not set, an empty flag is a mistake."""
    if not value:
        raise argparse.ArgumentTypeError("must not be empty")
    return value


def _with_one_default(text: str) -> str:
    """Drop the default that the generator adds where there is none, or where the description tells it in words."""
    said, _, generated = text.rpartition(" (default: ")
    return said if generated in {"null)", ")"} or "(default: " in said else text


def _sentence(detail: ErrorDetails, arguments: Sequence[str]) -> str:
    if not detail["loc"]:
        return detail["msg"].removeprefix("Value error, ")
    complaint = detail["msg"].partition(", unable to")[0].partition(" should ")[2]
    return f"{_origin(str(detail['loc'][0]), arguments)} should {complaint}, not {_shown(detail['input'])}"


def _origin(field: str, arguments: Sequence[str]) -> str:
    """Return how the person who gave a value named it: by its flag, by its variable, or by its place."""
    flag, variable = f"--{field.replace('_', '-')}", f"SLIPSTREAM_{field.upper()}"
    if any(argument.partition("=")[0] == flag for argument in arguments):
        return flag
    return variable if any(name.upper() == variable for name in os.environ) else field.upper()


def _shown(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
