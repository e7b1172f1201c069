"""What the equivalence tests share."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _on_one_thread(one_thread: None) -> None:
    """Run all of them so."""
    del one_thread
