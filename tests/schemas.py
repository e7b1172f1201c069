"""Schemas that answers are asked to follow, and whether a value does: by hand, apart from what makes the grammars."""

import re
from collections.abc import Callable, Mapping
from typing import Any

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": ["string", "null"], "maxLength": 8},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "person": PERSON,
    "choice": {"enum": ["red", "green", "blue", 7, None]},
    "list": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 1, "maxItems": 4},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "nested": {
        "type": "object",
        "properties": {"people": {"type": "array", "items": PERSON, "maxItems": 2}, "done": {"type": "boolean"}},
        "required": ["people", "done"],
        "additionalProperties": False,
    },
}
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value is what a schema describes. Raises KeyError for what is not checked here."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        return False
    return all(_CHECKS[word](value, said, schema) for word, said in schema.items() if word != "type")


def _has_only_known(value: Any, said: bool, schema: Mapping[str, Any]) -> bool:
    return said or not isinstance(value, dict) or set(value) <= set(schema["properties"])


_CHECKS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], bool]] = {
    "enum": lambda value, said, _: value in said,
    "properties": lambda value, said, _: all(fits(value[name], said[name]) for name in value if name in said),
    "required": lambda value, said, _: all(name in value for name in said),
    "additionalProperties": _has_only_known,
    "items": lambda value, said, _: all(fits(item, said) for item in value),
    "minItems": lambda value, said, _: len(value) >= said,
    "maxItems": lambda value, said, _: len(value) <= said,
    "minimum": lambda value, said, _: value >= said,
    "maximum": lambda value, said, _: value <= said,
    "maxLength": lambda value, said, _: not isinstance(value, str) or len(value) <= said,
    "pattern": lambda value, said, _: re.search(said, value) is not None,
}
