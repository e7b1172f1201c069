"""Keys: who gets in, as whom, with which limits; and what is never said."""

import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.keys import KeyRing, read_keys
from services.gateway.tenants import MOST_URGENT, Tenant, tenant_of
from shared.errors import InvalidKey, InvalidParameter, StartupError

KEY, OTHER = "sk-0123456789", "sk-abcdefghij"
TWO_TENANTS = f"""
[tenants.search]
keys = ["{KEY}", "sk-new"]
max_streams = 2
max_queued_tokens = 100
least_priority = -5

[tenants.batch]
keys = ["{OTHER}"]
"""


def ring_of(text: str, folder: Path, *, max_streams: int | None = None) -> KeyRing:
    path = folder / "keys.toml"
    path.write_text(text)
    return read_keys(None, str(path), max_streams)


def test_without_keys_everybody_gets_in_and_what_one_sends_tells_clients_apart() -> None:
    ring = read_keys(None, None, 7)
    assert ring.is_open
    assert ring.tenant(None) == Tenant("", 7)
    assert ring.tenant(f"Bearer {KEY}") == Tenant(tenant_of(f"Bearer {KEY}"), 7)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \udcff"],
)
def test_whoever_brings_no_key_or_another_one_stays_outside_and_is_not_quoted(header: str | None) -> None:
    ring = read_keys(KEY, None, None)
    with pytest.raises(InvalidKey) as refused:
        ring.tenant(header)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_the_right_key_opens_however_the_scheme_is_written(scheme: str) -> None:
    assert read_keys(KEY, None, None).tenant(f"{scheme} {KEY}").name == tenant_of(f"Bearer {KEY}")


def test_a_file_names_tenants_with_limits_of_their_own(tmp_path: Path) -> None:
    ring = ring_of(TWO_TENANTS, tmp_path, max_streams=9)
    search = Tenant("search", 2, 100, -5)
    assert ring.tenant(f"Bearer {KEY}") == ring.tenant("Bearer sk-new") == search
    assert ring.tenant(f"Bearer {OTHER}") == Tenant("batch", 9, None, MOST_URGENT)
    with pytest.raises(InvalidParameter, match="-5"):
        search.check_priority(-6)
    search.check_priority(-5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tenants.a]\nkeys = []\n", "not as it should be"),
        ("[tenants]\n", "not as it should be"),
        ("", "not as it should be"),
        (f'[tenants.a]\nkeys = ["{KEY}"\n', "not as it should be"),
        (f'[tenants.a]\nkeys = ["{KEY}"]\nmax_stream = 1\n', "max_stream"),
        (f'[tenants.a]\nkeys = ["{KEY}"]\nmax_streams = 0\n', "max_streams"),
        (f'[tenants.a]\nkeys = ["{KEY} "]\n', "tenant 'a'"),
        (f'[tenants.a]\nkeys = ["{KEY}"]\n[tenants.b]\nkeys = ["{KEY}"]\n', "'a' and 'b' have the same"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence_without_a_key(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refused:
        ring_of(text, tmp_path)
    assert why in str(refused.value)
    assert KEY not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        read_keys(None, str(tmp_path / "nowhere"), None)


def test_a_ring_does_not_hold_what_it_was_given() -> None:
    ring = read_keys(KEY, None, None)
    assert KEY not in repr(vars(ring))


def test_every_key_is_compared_whole_in_constant_time_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    whole = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return bool(whole(one, other))

    monkeypatch.setattr(hmac, "compare_digest", counting)
    ring = KeyRing([(f"sk-{number}", Tenant(str(number))) for number in range(5)])
    for number in range(5):
        assert ring.tenant(f"Bearer sk-{number}").name == str(number)
    assert compared == [(64, 64)] * 25


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40))
def test_any_key_that_a_header_can_carry_opens(key: str) -> None:
    assert not KeyRing([(key, Tenant("x"))]).is_open
    assert KeyRing([(key, Tenant("x"))]).tenant(f"Bearer {key}").name == "x"
