"""Whose request it is, by the key that it brings."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tenants import tenant_of

SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "bearer   ", "Basic YTpi", "sk-naked", "Bearersk-1"])
def test_who_brings_no_key_is_nobody(header: str | None) -> None:
    assert tenant_of(header) == ""


@given(SECRETS, SECRETS)
def test_a_key_is_sixteen_digits_that_tell_it_from_others(one: str, other: str) -> None:
    tenant = tenant_of(f"Bearer {one}")
    assert len(tenant) == 16
    assert int(tenant, base=16) >= 0
    assert one == other or tenant != tenant_of(f"Bearer {other}")


def test_the_digest_is_the_same_in_every_gateway_and_no_plain_hash_of_the_key() -> None:
    assert tenant_of("Bearer sk-1") == "04180407ea8a0e27"
    assert tenant_of("Bearer sk-1") != hashlib.blake2b(b"sk-1", digest_size=8).hexdigest()


@pytest.mark.parametrize("header", ["Bearer sk-1", "bearer sk-1", "BEARER   sk-1  ", " Bearer sk-1"])
def test_how_the_scheme_is_written_changes_nothing(header: str) -> None:
    assert tenant_of(header) == tenant_of("Bearer sk-1")


def test_a_key_of_any_bytes_has_a_digest() -> None:
    assert len(tenant_of(b"Bearer \xff\xfe".decode(errors="surrogateescape"))) == 16
