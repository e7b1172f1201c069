"""``response_format``: the grammar that an answer has to follow. Pure."""

from typing import Any

import msgspec
from llguidance import LLMatcher
from msgspec import Struct

from services.gateway.nested import check_nested
from services.gateway.tool_grammars import COMPACT, why_not
from shared.errors import InvalidParameter

_SCHEMA = "response_format.json_schema.schema"


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Anything."""


class ObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Some object of JSON."""


class NamedSchema(Struct, forbid_unknown_fields=True):
    """A schema as OpenAI's clients wrap it. It is followed whether it says ``strict`` or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that follows a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat


def format_grammar(wanted: ResponseFormat | None) -> str:
    """Return the grammar of a format, empty if anything will do. Raises InvalidParameter: it cannot be followed.

    Between the parts of the JSON there is at most one blank: where any white space may come, small models write nothing
    else.
    """
    if wanted is None or isinstance(wanted, TextFormat):
        return ""
    given = wanted.json_schema.schema if isinstance(wanted, SchemaFormat) else None
    schema = {"type": "object"} if given is None else given
    check_nested(schema, _SCHEMA)
    text = msgspec.json.encode({**schema, "x-guidance": COMPACT}).decode()
    grammar = str(LLMatcher.grammar_from_json_schema(text))
    why = why_not(grammar)
    if why is not None:
        raise InvalidParameter(f"{_SCHEMA}: {why}", param="response_format")
    return grammar
