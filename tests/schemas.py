"""Schemas that answers are asked to follow, and whether a value does: by hand, apart from what makes the grammars."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
LARGER: Mapping[str, dict[str, Any]] = {
    "order": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^ORD-[0-9]{4}$"},
            "customer": PERSON,
            "lines": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "product": {"type": "string", "minLength": 3, "maxLength": 16},
                        "count": {"type": "integer", "minimum": 1, "maximum": 99},
                        "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000},
                    },
                    "required": ["product", "count", "price"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": 3,
            },
            "paid": {"type": "boolean"},
        },
        "required": ["id", "customer", "lines", "paid"],
        "additionalProperties": False,
    },
    "shape": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0, "maximum": 9}},
                "required": ["kind", "radius"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {
                    "kind": {"const": "rectangle"},
                    "sides": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 1},
                        "minItems": 2,
                        "maxItems": 2,
                    },
                    "color": {"enum": ["red", "green", None]},
                },
                "required": ["kind", "sides"],
                "additionalProperties": False,
            },
        ]
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number", "minimum": -1, "maximum": 1},
                    "leaves": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
                },
                "required": ["value", "leaves"],
                "additionalProperties": False,
            },
            "leaf": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 8}, {"type": "boolean"}]},
        },
    },
}
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def fits(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> bool:
    """Return whether a value is what a schema describes. Raises KeyError for what is not checked here."""
    root = schema if root is None else root
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        return False
    said = {word: told for word, told in schema.items() if word not in {"type", "$defs"}}
    return all(_CHECKS[word](value, told, _Around(schema, root)) for word, told in said.items())


@dataclass(frozen=True)
class _Around:
    """The schema that a word stands in, and the one in which names are looked up."""

    schema: Mapping[str, Any]
    root: Mapping[str, Any]

    def fits(self, value: Any, schema: Mapping[str, Any]) -> bool:
        return fits(value, schema, self.root)


def _has_only_known(value: Any, said: bool, around: _Around) -> bool:
    return said or not isinstance(value, dict) or set(value) <= set(around.schema["properties"])


_CHECKS: Mapping[str, Callable[[Any, Any, _Around], bool]] = {
    "enum": lambda value, said, _: value in said,
    "const": lambda value, said, _: value == said,
    "anyOf": lambda value, said, around: any(around.fits(value, one) for one in said),
    "$ref": lambda value, said, around: around.fits(value, around.root["$defs"][said.removeprefix("#/$defs/")]),
    "properties": lambda value, said, around: all(
        around.fits(value[name], said[name]) for name in value if name in said
    ),
    "required": lambda value, said, _: all(name in value for name in said),
    "additionalProperties": _has_only_known,
    "items": lambda value, said, around: all(around.fits(item, said) for item in value),
    "minItems": lambda value, said, _: len(value) >= said,
    "maxItems": lambda value, said, _: len(value) <= said,
    "minimum": lambda value, said, _: value >= said,
    "exclusiveMinimum": lambda value, said, _: value > said,
    "maximum": lambda value, said, _: value <= said,
    "minLength": lambda value, said, _: not isinstance(value, str) or len(value) >= said,
    "maxLength": lambda value, said, _: not isinstance(value, str) or len(value) <= said,
    "pattern": lambda value, said, _: re.search(said, value) is not None,
}
