"""How long the lines of a chat template may run. A model folder is not trusted code, and three loops never end.

Templates have no steps that could be counted from outside, and a thread cannot be stopped; but Python tells, line by
line, what of a template it runs, and the time of a thread's own processor does not depend on who else is busy.

Nothing else is bounded. What one line calls (a huge repetition, a sort, one of Jinja's filters) is not looked into, nor
is the compiling, which works out constants: that they took too long is noticed at a later line, if there is one. And
nobody counts memory: what the system does not have is a MemoryError, what it has a template may take.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import nodes

from shared.runtime.clock import thread_cpu_s

TEMPLATE_CPU_S = 2.0
"""A chat of 20,000 messages takes 0.3 s, one of one message 60 µs, of which 40 are what looking on costs."""
_LINES_BETWEEN_LOOKS = 32
_COMPILED = "<template>"
"""What Jinja calls the code that it makes of a template."""


class EndlessTemplate(Exception):
    """A line of a template began later than one may."""


@contextmanager
def bounded(cpu_s: float = TEMPLATE_CPU_S) -> Iterator[None]:
    """Raise EndlessTemplate at a line of a template that this thread renders within, after so much processor time."""
    ends_s, lines = thread_cpu_s() + cpu_s, 0

    def on_line(_frame: FrameType, _event: str, _arg: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines % _LINES_BETWEEN_LOOKS == 0 and thread_cpu_s() > ends_s:
            raise EndlessTemplate(f"it does not end within {cpu_s:g} s")
        return on_line

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        return on_line if frame.f_code.co_filename == _COMPILED else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def has_power(template: nodes.Template) -> bool:
    """Say whether a template raises to a power: no chat needs it, and 9 ** 9 ** 9 is one line without an end."""
    return next(template.find_all(nodes.Pow), None) is not None
