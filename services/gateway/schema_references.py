"""References within a JSON schema that lead back to themselves: there is no value that they describe. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_CHAIN = 100
"""References to references that are followed at most; what is left then counts as endless."""
_LINKS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""What says of the same value what something else says."""


def has_endless_reference(schema: Mapping[str, Any]) -> bool:
    """Return whether a part of a schema can be resolved only by resolving itself first.

    A list in a list is no such part: there is a value in between. A reference that leads nowhere is not looked at here.
    """
    waiting = {id(node): node for node in _objects(schema) if not _LINKS.isdisjoint(node)}
    for _ in range(MAX_CHAIN):
        before = len(waiting)
        for key, node in list(waiting.items()):
            if _is_resolved(node, schema, waiting):
                del waiting[key]
        if len(waiting) in {0, before}:
            break
    return bool(waiting)


def _is_resolved(node: Mapping[str, Any], root: Mapping[str, Any], waiting: Mapping[int, object]) -> bool:
    """Return whether nothing that this part needs waits itself; of alternatives it needs one."""
    needed = [*_parts(node, "allOf"), *([_found(root, node["$ref"])] if isinstance(node.get("$ref"), str) else [])]
    alternatives = [parts for word in ("anyOf", "oneOf") if (parts := _parts(node, word))]
    is_waiting = any(id(part) in waiting for part in needed)
    return not is_waiting and all(any(id(part) not in waiting for part in parts) for parts in alternatives)


def _parts(node: Mapping[str, Any], word: str) -> list[Any]:
    parts = node.get(word)
    return parts if isinstance(parts, list) else []


def _found(root: object, reference: str) -> object:
    """Return the part that a reference within the schema points at; None if it does not, or names it otherwise."""
    begin, *steps = unquote(reference).split("/")
    if begin != "#":
        return None
    found = root
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _objects(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    left: list[object] = [schema]
    while left:
        match left.pop():
            case dict() as node:
                yield node
                left += node.values()
            case list() as items:
                left += items
