"""Bad requests get an HTTP error that names the field, before any stream; the server lives and shows no traceback."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest

from tests.end_to_end.served import FAKE, MODEL, figures, nothing_is_left, url_of
from tests.integration.processes import Up, slipstream_up

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with TemporaryDirectory() as folder, slipstream_up(Path(folder), *FAKE) as running:
        yield running.until_ready()


async def post(up: Up, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(f"{url_of(up)}{path}", **body) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
Case = tuple[str, dict[str, Any], int, str, str | None]
CASES: list[Case] = [
    (COMPLETIONS, {**HI, "prompt": [65] * 9000}, 400, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {**HI, "max_tokens": 9000}, 400, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {**HI, "n": 0}, 400, "n", None),
    (COMPLETIONS, {**HI, "max_tokens": -1}, 400, "max_tokens", None),
    (COMPLETIONS, {**HI, "temperature": -1}, 400, "temperature", None),
    (COMPLETIONS, {**HI, "stop": ""}, 400, "stop", None),
    (COMPLETIONS, {**HI, "model": "other"}, 404, "model", "model_not_found"),
    (CHAT, {"model": MODEL, "messages": []}, 400, "messages", None),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 9000}]}, 400, "messages", None),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": -5}, 400, "max_tokens", None),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools[0].type", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
async def test_a_bad_field_is_named_before_any_stream_starts(up: Up, case: Case, *, stream: bool) -> None:
    path, body, status, param, code = case
    got, answer = await post(up, path, json={**body, "stream": stream})
    error = answer["error"]
    assert (got, error["param"]) == (status, param)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert code in (None, error["code"])


@pytest.mark.parametrize("data", [b'{"model":"m","prompt":"x", x}', b"", b"[]", b"\xff\xfe", b"null"])
async def test_a_malformed_body_is_a_400_in_the_same_envelope(up: Up, data: bytes) -> None:
    status, answer = await post(up, COMPLETIONS, data=data, headers={"Content-Type": "application/json"})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


async def test_after_all_that_the_server_serves_and_has_written_no_traceback(up: Up) -> None:
    status, answer = await post(up, COMPLETIONS, json={**HI, "max_tokens": 3, "ignore_eos": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert "Traceback" not in up.stderr
    assert nothing_is_left(await figures(up))
