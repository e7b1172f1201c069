"""What the text of an answer must be, as a grammar that workers follow, checked before anything is submitted. Pure.

The checks take up to some tenths of a second: they belong into a thread, as tokenising does.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from services.gateway.bodies import GenerationBody
from services.gateway.schema_references import has_endless_reference
from shared.errors import InvalidParameter
from shared.protocol.grammars import GRAMMAR_LIMITS, MAX_GRAMMAR_BYTES

PARAM = "response_format"
WHITESPACE = r"( |\n[ \t]{0,20})"
"""What may stand once between two tokens of JSON: what `json.dumps` writes, with ``indent`` or without.

JSON allows blanks without end there, and small models then write nothing else until ``max_tokens``. A schema may say
otherwise in its ``x-guidance``.
"""
MAX_MULTIPLE = 10_000
"""The least common multiple of all ``multipleOf`` of a schema, in units of their last decimal place.

A grammar has as many states: 99,991 took 1.4 s to make, 104,729,000 took 50 s and 3 GB, and llguidance has no limit.
"""
_MAX_NUMBER = 1e15
_ERROR_CHARACTERS = 500
_CHECKED_GRAMMARS = 64
_LIMITS = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)


def grammar_of(body: GenerationBody) -> str:
    """Return the grammar of ``response_format``, "" if the answer is free. Raises InvalidParameter."""
    wanted = body.response_format
    if wanted is None:
        return ""
    if wanted.type != "json_schema":
        if wanted.json_schema is not None:
            raise InvalidParameter(f"{PARAM}: a json_schema only with the type json_schema", param=PARAM)
        return "" if wanted.type == "text" else grammar_of_schema({"type": "object"}, PARAM)
    if wanted.json_schema is None:
        raise InvalidParameter(f"{PARAM}: the type json_schema needs a json_schema", param=PARAM)
    return grammar_of_schema(wanted.json_schema.schema, PARAM)


def grammar_of_schema(schema: Mapping[str, Any], param: str) -> str:
    """Return the grammar of the JSON that a schema describes. Raises InvalidParameter that names ``param``."""
    text = check_schema(schema, param)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
    except ValueError as error:  # nested too deep for its reader
        raise InvalidParameter(f"{param}: {error}", param=param) from error
    check_grammar(grammar, param)
    return grammar


def check_schema(schema: Mapping[str, Any], param: str) -> str:
    """Return a schema as JSON. Raises InvalidParameter for what llguidance finds too late, or has no bound for."""
    text = msgspec.json.encode(schema)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(f"{param}: at most {MAX_GRAMMAR_BYTES} bytes of schema are taken", param=param)
    if _common_multiple(schema) > MAX_MULTIPLE:
        raise InvalidParameter(f"{param}: multipleOf is served up to {MAX_MULTIPLE} steps in all", param=param)
    if has_endless_reference(schema):
        raise InvalidParameter(f"{param}: a $ref leads back to itself: there is no value like that", param=param)
    return text.decode()


def check_grammar(grammar: str, param: str) -> None:
    """Raise InvalidParameter, in llguidance's words, if a grammar cannot be followed or is too large."""
    fault = fault_of(grammar)
    if fault:
        raise InvalidParameter(f"{param}: {fault}", param=param)


def fault_of(grammar: str) -> str:
    """Return why a grammar cannot be followed, by the bounds that workers have too; empty if it can."""
    return _fault(grammar) if len(grammar.encode()) <= MAX_GRAMMAR_BYTES else "the grammar is too large"


@lru_cache(_CHECKED_GRAMMARS)
def _fault(grammar: str) -> str:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    return " ".join(messages[0].split())[:_ERROR_CHARACTERS] if is_error else ""


def _common_multiple(schema: Mapping[str, Any]) -> int:
    steps = set(_steps(schema))
    if any(abs(step) >= _MAX_NUMBER for step in steps):
        return MAX_MULTIPLE + 1
    exact = [Decimal(str(step)).normalize() for step in steps]
    places = max((-int(step.as_tuple().exponent) for step in exact), default=0)
    return math.lcm(*(int(step.scaleb(max(places, 0))) for step in exact))


def _steps(schema: Mapping[str, Any]) -> Iterator[float]:
    """Return every number that stands as ``multipleOf`` anywhere."""
    left: list[object] = [schema]
    while left:
        match left.pop():
            case dict() as node:
                step = node.get("multipleOf")
                if isinstance(step, int | float) and not isinstance(step, bool):
                    yield step
                left += node.values()
            case list() as items:
                left += items
