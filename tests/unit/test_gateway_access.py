"""The turnstile: how much each client may have under way."""

from contextlib import ExitStack

import pytest

from services.gateway.access import Turnstile
from services.gateway.app import Entrance
from services.gateway.keys import KeyRing
from services.gateway.tenants import Tenant
from shared.errors import KeyLimited, StartupError

ONE, OTHER = Tenant("one", 2), Tenant("other", 1)


def test_each_client_has_its_own_count_and_who_has_left_counts_no_more() -> None:
    turnstile = Turnstile()
    with ExitStack() as under_way:
        for tenant in (ONE, ONE, OTHER):
            under_way.enter_context(turnstile.enter(tenant))
        assert turnstile.under_way == 3
        for tenant in (ONE, OTHER):
            with pytest.raises(KeyLimited):
                turnstile.enter(tenant)
    assert turnstile.under_way == 0
    assert not turnstile._of, "nobody is remembered"
    with turnstile.enter(OTHER):
        pass


def test_who_fails_on_the_way_has_left_too() -> None:
    turnstile = Turnstile()
    with pytest.raises(ValueError, match="bad"), turnstile.enter(OTHER):
        raise ValueError("bad")
    with turnstile.enter(OTHER):
        pass


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/"])
def test_nothing_that_works_can_be_opened(path: str) -> None:
    with pytest.raises(StartupError, match="cannot be opened"):
        Entrance(KeyRing(), frozenset({path, "/metrics"}))
