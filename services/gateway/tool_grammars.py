"""Grammars for answers that have to call a tool, or that call it properly if they do. Pure.

In the language of llguidance: what the layout of the model wants is text, arguments follow the function's own schema.
A mark that is one token of the model is named by its number, because the text alone would be other tokens.
"""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from services.gateway.tool_calls import Layout

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""As models write JSON: free white space is where small ones lose themselves."""
_NONE = {"type": "object", "properties": {}, "additionalProperties": False}

_BEGIN, _END = '{"name": "', "}"

Functions = Mapping[str, Mapping[str, Any] | None]
"""The schema of each function's arguments; None if it takes none."""


def must_call(layout: Layout, functions: Functions, marker_ids: Mapping[str, int], *, most: int | None) -> str:
    """Return the grammar of one call, or of one or more, and of nothing else."""
    opening = "" if layout.is_open_at_start else _mark(layout.opening, marker_ids)
    return _grammar([f"start: {_calls(layout, opening, marker_ids, most)}"], layout, functions)


def may_call(layout: Layout, functions: Functions, marker_ids: Mapping[str, int], *, most: int | None) -> str:
    """Return the grammar of text in which every call is one that can be read, at most so many of them."""
    body = _calls(layout, "", marker_ids, most)
    if layout.is_open_at_start:
        return _grammar([f"start: {body} | TEXT?", "TEXT: /[^{](.|\\n)*/"], layout, functions)
    opening = _mark(layout.opening, marker_ids)
    if layout.opening in marker_ids:
        head, rules = f"TEXT {opening}", []
    else:
        head, rules = "head", [f"head[lazy]: TEXT {opening}"]
    start = f"({head} body)* rest" if most is None else f"{head} body | rest"
    rules += [f"start: {start}", f"body: {body}", "rest: TEXT", "TEXT: /(.|\\n)*/"]
    return _grammar(rules, layout, functions)


def _grammar(rules: list[str], layout: Layout, functions: Functions) -> str:
    names = list(functions)
    behind = f'", "{layout.arguments}": '
    choices = " | ".join(f"{_text(name + behind)} args_{n}" for n, name in enumerate(names))
    lines = ["%llguidance {}", *rules, f"object: {_text(_BEGIN)} ({choices}) {_text(_END)}"]
    lines += [f"args_{n}: %json {_schema(functions[name])}" for n, name in enumerate(names)]
    return str(LLMatcher.grammar_from_lark("\n".join(lines) + "\n"))


def _calls(layout: Layout, opening: str, marker_ids: Mapping[str, int], most: int | None) -> str:
    """Return the rule for calls, behind their mark if ``opening`` is empty."""
    if layout.separator:
        one = "object" if most == 1 else f"object ({_text(f'{layout.separator} ')} object)*"
        lead = f"/ ?/ {_text(layout.lead)}" if layout.lead else ""
        return " ".join(filter(None, (opening, lead, one, _text(layout.closing) if layout.closing else "")))
    closing = _mark(layout.closing, marker_ids)
    one = " ".join(filter(None, (opening, _text("\n"), "object", _text("\n"), closing)))
    return one if most == 1 or not opening else f"{one} ({_text(chr(10))} {one})*"


def _mark(mark: str, marker_ids: Mapping[str, int]) -> str:
    return f"<[{marker_ids[mark]}]>" if mark in marker_ids else _text(mark)


def _text(text: str) -> str:
    return json.dumps(text)


def _schema(parameters: Mapping[str, Any] | None) -> str:
    schema = _NONE if parameters is None else parameters
    return json.dumps({"type": "object", **schema, "x-guidance": _COMPACT})
