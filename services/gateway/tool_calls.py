"""Calls of tools in the text of an answer, in the layout that the model was taught. Pure.

=========  ====================================================================  =================================
layout     one call, and what may stand between two                              known by, in the chat template
=========  ====================================================================  =================================
`HERMES`   ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, each by     ``<tool_call>``, ``arguments``
           itself
`MISTRAL`  ``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``                   ``[TOOL_CALLS]``
`LLAMA`    ``{"name": …, "parameters": {…}}``, alone from the first character    ``"name":``, ``"parameters":``
           or behind ``<|python_tag|>``; ``;`` between two
=========  ====================================================================  =================================

A call is an object that names one of the request's functions and has an object of arguments. Everything else is
content, the marks around it too. White space beside a call is a part of its layout. Arguments are told as they come,
as the model writes them: that they are valid JSON only a grammar can promise.
"""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import msgspec

from services.gateway.tool_calls_json import Brackets


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model writes calls. ``lead`` and ``separator`` are single characters, or none."""

    opening: str
    closing: str = ""
    lead: str = ""
    separator: str = ""
    arguments: str = "arguments"
    is_open_at_start: bool = False


HERMES = Layout("<tool_call>", "</tool_call>")
MISTRAL = Layout("[TOOL_CALLS]", "]", lead="[", separator=",")
LLAMA = Layout("<|python_tag|>", separator=";", arguments="parameters", is_open_at_start=True)

_OTHER_LAYOUTS = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]")
"""Templates that have these write calls in ways that are not read here, whatever else they have."""


def layout_of(template: str) -> Layout | None:
    """Return how the model of a chat template writes calls; None if it is no way that is read here."""
    if any(mark in template for mark in _OTHER_LAYOUTS):
        return None
    if HERMES.opening in template:
        return HERMES if "arguments" in template else None
    if MISTRAL.opening in template:
        return MISTRAL
    plain = template.replace("\\", "")
    return LLAMA if '"name":' in plain and '"parameters":' in plain else None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of one call: the first one names the function, the arguments of all of them together are the whole."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Read:
    """What a piece of text turned out to be."""

    content: str
    calls: tuple[CallPiece, ...] = ()


class _Out:
    """Gathers what one piece of text turns out to be."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.calls: list[CallPiece] = []

    def call(self, index: int, arguments: str, name: str | None = None) -> None:
        if name is None and self.calls and self.calls[-1].index == index:
            last = self.calls[-1]
            self.calls[-1] = replace(last, arguments=last.arguments + arguments)
        elif name is not None or arguments:
            self.calls.append(CallPiece(index, name, arguments))

    def read(self) -> Read:
        return Read("".join(self.content), tuple(self.calls))


_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The usual beginning of a call, up to its arguments: from here they are told as they come."""

_State = Callable[[_Out, bool], bool]


class CallParser:
    """Tells calls from content. However the text is split into pieces, what comes out is the same all together."""

    def __init__(self, layout: Layout, names: AbstractSet[str], *, most: int | None = None) -> None:
        self.calls = 0
        self._layout = layout
        self._names = names
        self._most = most
        self._held = ""
        """Text of which it is not known yet what it is."""
        self._marks = ""
        """Layout before it, which is content if no call follows."""
        self._lead = ""
        self._brackets = Brackets()
        self._scanned = 0
        self._state: _State = self._in_text
        if layout.is_open_at_start:
            self._await_object("", "")

    def push(self, text: str) -> Read:
        """Take the next piece of the answer."""
        self._held += text
        return self._read(is_over=False)

    def end(self) -> Read:
        """Return what is left when the answer is over."""
        return self._read(is_over=True)

    @property
    def _may_call(self) -> bool:
        return self._most is None or self.calls < self._most

    def _read(self, *, is_over: bool) -> Read:
        out = _Out()
        while self._state(out, is_over):
            pass
        return out.read()

    # every state takes what it knows from the held text, and says whether there is more to do at once

    def _in_text(self, out: _Out, is_over: bool) -> bool:
        at = self._held.find(self._layout.opening) if self._may_call else -1
        if at < 0:
            kept = len(self._held) if is_over else self._decided()
            told = self._held[:kept]
            out.content.append(told.rstrip() if is_over and self.calls else told)
            self._held = self._held[kept:]
            return False
        end, behind = len(self._held[:at].rstrip()), at + len(self._layout.opening)
        out.content.append(self._held[:end])
        marks, self._held = self._held[end:behind], self._held[behind:]
        self._await_object(marks, self._layout.lead)
        return True

    def _decided(self) -> int:
        """Return how much of the held text is content: not white space at its end, not what may become a mark."""
        opening, text = self._layout.opening, self._held
        begun = next((n for n in range(len(opening) - 1, 0, -1) if text.endswith(opening[:n])), 0)
        return len(text[: len(text) - begun].rstrip())

    def _await_object(self, marks: str, lead: str) -> None:
        self._marks, self._lead = marks, lead
        self._brackets, self._scanned = Brackets(), 0
        self._state = self._before_arguments

    def _no_call(self, out: _Out) -> bool:
        """Let the marks out, which were none, and look for others behind them."""
        out.content.append(self._marks)
        self._marks = ""
        return self._go_on(self._in_text)

    def _before_arguments(self, out: _Out, is_over: bool) -> bool:
        rest = self._held.lstrip()
        for expected in filter(None, (self._lead, "{")):
            if not rest:
                return is_over and self._no_call(out)
            if rest[0] != expected:
                return self._no_call(out)
            rest = rest if expected == "{" else rest[1:].lstrip()
        begin = len(self._held) - len(rest)
        head = _HEAD.match(self._held, begin)
        if head is None:
            return self._whole(out, begin, is_over)
        if head[1] not in self._names:
            return self._no_call(out)
        self._brackets = Brackets()
        for character in head[0]:
            self._brackets.step(character)
        out.call(self.calls, "", head[1])
        self._held = self._held[head.end() :]
        return self._go_on(self._in_arguments)

    def _whole(self, out: _Out, begin: int, is_over: bool) -> bool:
        """Wait for the end of an object that does not begin like a call, and see whether it is one."""
        for end in range(max(begin, self._scanned), len(self._held)):
            if not self._brackets.step(self._held[end]):
                return self._no_call(out)
            if not self._brackets.depth:
                return self._decide(out, begin, end + 1)
        self._scanned = len(self._held)
        return is_over and self._no_call(out)

    def _decide(self, out: _Out, begin: int, end: int) -> bool:
        call = _call_in(self._held[begin:end], self._names)
        if call is None:
            return self._no_call(out)
        name, arguments = call
        out.call(self.calls, arguments, name)
        self._held = self._held[end:]
        return self._called()

    def _in_arguments(self, out: _Out, _is_over: bool) -> bool:
        for at, character in enumerate(self._held):
            is_broken = not self._brackets.step(character)
            if is_broken or self._brackets.depth == 1:
                end = at if is_broken else at + 1
                out.call(self.calls, self._held[:end])
                self._held = self._held[end:]
                return self._called() if is_broken else self._go_on(self._behind_arguments)
        out.call(self.calls, self._held)
        self._held = ""
        return False

    def _behind_arguments(self, _out: _Out, is_over: bool) -> bool:
        rest = self._held.lstrip()
        if not rest:
            self._held = "" if is_over else self._held
            return False
        if rest[0] == ",":
            return self._go_on(self._in_other_members)
        self._held = rest[1:] if rest[0] == "}" else self._held
        return self._called()

    def _in_other_members(self, _out: _Out, _is_over: bool) -> bool:
        """Drop what else the object has, an id for example."""
        for at, character in enumerate(self._held):
            is_broken = not self._brackets.step(character)
            if is_broken or not self._brackets.depth:
                self._held = self._held[at if is_broken else at + 1 :]
                return self._called()
        self._held = ""
        return False

    def _called(self) -> bool:
        self.calls += 1
        return self._go_on(self._behind_call)

    def _go_on(self, state: _State) -> bool:
        self._state = state
        return True

    def _behind_call(self, _out: _Out, is_over: bool) -> bool:
        layout, rest = self._layout, self._held.lstrip()
        if layout.separator and rest.startswith(layout.separator) and self._may_call:
            behind = len(self._held) - len(rest) + 1
            marks, self._held = self._held[:behind], self._held[behind:]
            self._await_object(marks, "")
            return True
        if not rest or (layout.closing.startswith(rest) and rest != layout.closing):
            self._held = "" if is_over else self._held  # layout that was cut off is no text
            return False
        if layout.closing and rest.startswith(layout.closing):
            self._held = rest[len(layout.closing) :]
        return self._go_on(self._in_text)


def _call_in(text: str, names: AbstractSet[str]) -> tuple[str, str] | None:
    """Return function and arguments of an object that is a call, in whatever order it has them."""
    try:
        told = msgspec.json.decode(text)
        arguments = told.get("arguments", told.get("parameters"))
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    name = told.get("name")
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, msgspec.json.encode(arguments).decode()
