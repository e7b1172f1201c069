"""What tests with the default model share. A file that needs other flags has an ``up`` of its own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.end_to_end.asking import session_of
from tests.end_to_end.served import client_of
from tests.integration.processes import Up, slipstream_up


@pytest.fixture(scope="module")
def up(model_folder: Path) -> Iterator[Up]:
    """`slipstream up` as it is by default."""
    assert model_folder.is_dir()  # fetched and converted, so that this start is a second one
    with TemporaryDirectory() as folder, slipstream_up(Path(folder)) as running:
        yield running.until_ready(within_s=120)


@pytest.fixture(scope="module")
def float32_up(model_folder: Path) -> Iterator[Up]:
    """The same in float32, in which an answer does not depend on who else is in the batch."""
    assert model_folder.is_dir()
    with TemporaryDirectory() as folder, slipstream_up(Path(folder), "--dtype", "float32") as running:
        yield running.until_ready(within_s=120)


@pytest.fixture
async def session(up: Up) -> AsyncIterator[aiohttp.ClientSession]:
    """Raw HTTP to ``up``."""
    async with session_of(up, timeout_s=120) as opened:
        yield opened


@pytest.fixture
async def client(up: Up) -> AsyncIterator[AsyncOpenAI]:
    """The official client of ``up``."""
    async with client_of(up) as opened:
        yield opened
