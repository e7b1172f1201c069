"""The document says what the routes do: made from their types, whole, and in keeping with what they answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from services.gateway.bodies import NEUTRAL
from tests.integration.gateway_pool import gateway


async def told(**settings: Any) -> Any:
    async with gateway(**settings) as setting:
        headers = {"Authorization": f"Bearer {settings['api_key']}"} if "api_key" in settings else {}
        async with setting.client.session.get("/openapi.json", headers=headers) as response:
            assert (response.status, response.content_type) == (200, "application/json")
            return await response.json()


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references(inner)


async def test_every_route_is_told_and_everything_that_is_named_is_there() -> None:
    document = await told()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
        "/health", "/ready", "/metrics", "/openapi.json",
    }  # fmt: skip
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names <= set(document["components"]["schemas"])
    assert "security" not in document


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody"])
async def test_bodies_are_told_as_they_are_checked(body: str) -> None:
    schema = (await told())["components"]["schemas"][body]
    assert schema["additionalProperties"] is False
    assert "model" in schema["required"]
    fields = schema["properties"]
    assert {"type": "integer", "minimum": -100, "maximum": 100, "default": 0} in fields["priority"]["anyOf"]
    assert set(NEUTRAL) <= set(fields)
    for name in set(fields) - set(schema["required"]):
        allowed = fields[name].get("anyOf", fields[name].get("enum"))
        assert {"type": "null"} in allowed or None in allowed, name


async def test_no_tokens_and_an_echo_are_for_completions_alone() -> None:
    schemas = (await told())["components"]["schemas"]
    text, chat = schemas["CompletionBody"]["properties"], schemas["ChatBody"]["properties"]
    assert {"type": "boolean", "default": False} in text["echo"]["anyOf"]
    assert chat["echo"] == {"enum": [False, None]}
    assert [one["minimum"] for fields in (text, chat) for one in fields["max_tokens"]["anyOf"] if "minimum" in one] == [
        0,
        1,
    ]


async def test_a_gateway_with_keys_says_that_it_needs_one_and_where_it_needs_none() -> None:
    document = await told(api_key="sk-0123456789", open_paths="/metrics")
    assert document["security"] == [{"key": []}]
    open_to_all = {
        path for path, routes in document["paths"].items() if any("security" in one for one in routes.values())
    }
    assert open_to_all == {"/health", "/ready", "/metrics"}
