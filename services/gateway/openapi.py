"""The OpenAPI document, made from the types that check bodies and that write answers: it cannot say anything else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.bodies import INT32_MAX, NEUTRAL, ChatBody, CompletionBody
from services.gateway.formats import ErrorEnvelope, Model, ModelList, Ready, Usage
from services.gateway.token_routes import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody

_REF = "#/components/schemas/{name}"
_JSON, _SSE = "application/json", "text/event-stream"
_ERRORS = {
    400: "The body cannot be read, or a field has a value that is not taken.",
    401: "A key is needed, and there was none that is known.",
    404: "There is no such model.",
    408: "The body did not arrive in time, or the request waited for too long.",
    413: "The body is too large.",
    429: "Too many requests: Retry-After says when to try again.",
    500: "The request failed.",
    503: "Nothing is served now: Retry-After says when to try again.",
    504: "The answer was not whole within the request's own timeout.",
}
_NULL = {"type": "null"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
# the one field that is checked by hand: a type cannot tell lists of several kinds apart
_PROMPT = {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]}
_Json = dict[str, Any]


class Health(Struct):
    """The answer of /health."""

    status: str


class Answer(Struct):
    """What was generated, or the chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class _Route:
    method: str
    path: str
    name: str
    summary: str
    answer: type[Struct] | None
    body: type[Struct] | None = None
    errors: tuple[int, ...] = (401, 500)
    streams: bool = False


_BODY_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)
_GENERATION_ERRORS = (*_BODY_ERRORS, 504)
ROUTES = (
    _Route(
        "post", "/v1/chat/completions", "chat", "Continue a chat.", Answer, ChatBody, _GENERATION_ERRORS, streams=True
    ),
    _Route(
        "post",
        "/v1/completions",
        "complete",
        "Continue a text.",
        Answer,
        CompletionBody,
        _GENERATION_ERRORS,
        streams=True,
    ),
    _Route("post", "/tokenize", "tokenize", "Tokens of a text or a chat.", TokenizeAnswer, TokenizeBody, _BODY_ERRORS),
    _Route("post", "/detokenize", "detokenize", "Text of tokens.", DetokenizeAnswer, DetokenizeBody, _BODY_ERRORS),
    _Route("get", "/v1/models", "models", "The models that are served.", ModelList),
    _Route("get", "/v1/models/{name}", "model", "One model.", Model, errors=(401, 404, 500)),
    _Route("get", "/health", "health", "Whether this process lives.", Health, errors=(500,)),
    _Route("get", "/ready", "ready", "Whether a request would be served now.", Ready, errors=(500,)),
    _Route("get", "/metrics", "metrics", "Figures for Prometheus.", None),
    _Route("get", "/openapi.json", "openapi", "This document.", None),
)


def document(open_paths: frozenset[str] | None) -> bytes:
    """Return the document as JSON, for a gateway that asks for a key on all paths but these, or on none (``None``)."""
    types = [ErrorEnvelope, *(kind for route in ROUTES for kind in (route.answer, route.body) if kind is not None)]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    bodies = {route.body.__name__ for route in ROUTES if route.body is not None}
    for name in _reachable(schemas, bodies):
        _let_null_mean_the_default(schemas[name])
    schemas[CompletionBody.__name__]["properties"]["prompt"] = _PROMPT
    for kind in (ChatBody, CompletionBody):
        _name_what_is_known_and_not_served(schemas[kind.__name__])
    paths: dict[str, _Json] = {}
    for route in ROUTES:
        operation = paths.setdefault(route.path, {})[route.method] = _operation(route)
        if open_paths is not None and route.path in open_paths:
            operation["security"] = []
    about: _Json = {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": "1", "description": "OpenAI's API for one pool of workers."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
    if open_paths is not None:
        about["security"] = [{"key": []}]
    return msgspec.json.encode(about)


def _operation(route: _Route) -> _Json:
    responses = {"200": {"description": route.summary, "content": _content(route)}}
    responses |= {str(status): _error(_ERRORS[status]) for status in route.errors}
    if route.answer is Ready:
        responses["503"] = {"description": "It would not.", "content": _json_of(Ready)}
    operation: _Json = {"operationId": route.name, "summary": route.summary, "responses": responses}
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json_of(route.body)}
    if "{name}" in route.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [parameter]
    return operation


def _content(route: _Route) -> _Json:
    if route.answer is None:
        return {_JSON: {"schema": {"type": "object"}}} if route.path.endswith(".json") else {"text/plain": {}}
    return _json_of(route.answer) | ({_SSE: {}} if route.streams else {})


def _json_of(kind: type[Struct]) -> _Json:
    return {_JSON: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _error(description: str) -> _Json:
    return {"description": description, "content": _json_of(ErrorEnvelope)}


def _reachable(schemas: Mapping[str, _Json], names: set[str]) -> set[str]:
    """Return the names of schemas that these refer to, directly or not, with themselves."""
    found: set[str] = set()
    left = set(names)
    while left:
        name = left.pop()
        found.add(name)
        left |= _references(schemas[name]) - found
    return found


def _references(schema: object) -> set[str]:
    if isinstance(schema, dict):
        own = {str(schema["$ref"]).rpartition("/")[2]} if "$ref" in schema else set()
        return own.union(*map(_references, schema.values()))
    return set().union(*map(_references, schema)) if isinstance(schema, list) else set()


def _let_null_mean_the_default(schema: _Json) -> None:
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        _let_null_mean_nothing(field)
        if name not in required and _NULL not in field.get("anyOf", []):
            schema["properties"][name] = {"anyOf": [field, _NULL]}


def _let_null_mean_nothing(field: _Json) -> None:
    """Tell that a null in a map is as if its name were not there."""
    for part in (field, *field.get("anyOf", [])):
        if isinstance(part.get("additionalProperties"), dict):
            part["additionalProperties"] = {"anyOf": [part["additionalProperties"], _NULL]}


def _name_what_is_known_and_not_served(schema: _Json) -> None:
    for name, values in NEUTRAL.items():
        schema["properties"].setdefault(name, {"enum": [*values, None]})
