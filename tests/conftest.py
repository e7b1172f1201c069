"""What all tests share."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder with a short path: a unix socket goes into it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on a busy machine two wait for each other at every barrier, and take minutes."""
    import torch  # noqa: PLC0415 - most tests do without it, and it takes seconds

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, fetched and converted by the project's own command on first use."""
    converted = subprocess.run(
        [sys.executable, "-m", "services.cli", "convert"], capture_output=True, text=True, check=False, timeout=600
    )
    assert converted.returncode == 0, converted.stderr
    return Path(converted.stdout.strip().splitlines()[-1])
