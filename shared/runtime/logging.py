"""Structured logs: events with names and fields, on standard error. Lines for a person at a terminal, else JSON."""

import logging
import sys
from functools import partial

import structlog


def configure(service: str, level: str) -> None:
    """Set up structlog for this process; every event carries the service's name."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            partial(_name, service),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # one write per line, so that the lines of several processes do not run into one another
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _name(service: str, _logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Say whose event it is: not by a context variable, which other threads would not see."""
    event["service"] = service
    return event
