"""The keys that open this gateway, and whose each is. Only digests of them stay in memory.

A key file is TOML::

    [tenants.search]
    keys = ["sk-…", "sk-…"]     # several, so that one can be replaced without a gap
    max_streams = 32            # requests under way at once
    max_queued_tokens = 20000   # tokens of prompts that wait
    least_priority = 0          # the most urgent that its requests may ask to be
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from services.gateway.tenants import MOST_URGENT, Tenant, bearer_of, tenant_of
from shared.errors import InvalidKey, StartupError

MAX_KEY_CHARACTERS = 512
_SALT = secrets.token_bytes(32)

_Limit = Annotated[int, Meta(ge=1)]


class _Entry(Struct, forbid_unknown_fields=True):
    keys: Annotated[list[str], Meta(min_length=1)]
    max_streams: _Limit | None = None
    max_queued_tokens: _Limit | None = None
    least_priority: Annotated[int, Meta(ge=MOST_URGENT, le=-MOST_URGENT)] = MOST_URGENT


class _File(Struct, forbid_unknown_fields=True):
    tenants: Annotated[dict[str, _Entry], Meta(min_length=1)]


class KeyRing:
    """Says whose key a request brings. Without keys everybody gets in, and whatever one sends tells clients apart.

    How long a look takes does not depend on how much of a key was right, nor on which key it was.
    """

    def __init__(self, keys: Iterable[tuple[str, Tenant]] = (), *, max_streams: int | None = None) -> None:
        self._max_streams = max_streams
        self._tenants: dict[bytes, Tenant] = {}
        for key, tenant in keys:
            _check(key, tenant)
            known = self._tenants.setdefault(_digest(key.encode()), tenant)
            if known != tenant:
                raise StartupError(f"tenants {known.name!r} and {tenant.name!r} have the same API key")

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._tenants

    def tenant(self, authorization: str | None) -> Tenant:
        """Return whose request it is. Raises InvalidKey."""
        if self.is_open:
            return Tenant(tenant_of(authorization), self._max_streams)
        presented = _digest(bearer_of(authorization))
        found = [tenant for digest, tenant in self._tenants.items() if hmac.compare_digest(digest, presented)]
        if not found:
            raise InvalidKey("a valid API key is needed, in the header Authorization: Bearer KEY")
        return found[0]


def read_keys(api_key: str | None, api_key_file: str | None, max_streams: int | None) -> KeyRing:
    """Return the keys of the settings. Raises StartupError with one sentence that holds no key."""
    keys = [] if api_key is None else [(api_key, Tenant(tenant_of(f"Bearer {api_key}"), max_streams))]
    if api_key_file is not None:
        keys += _keys_in(Path(api_key_file), max_streams)
    return KeyRing(keys, max_streams=max_streams)


def _keys_in(path: Path, max_streams: int | None) -> Iterator[tuple[str, Tenant]]:
    try:
        entries = msgspec.toml.decode(path.read_bytes(), type=_File).tenants
    except OSError as error:
        raise StartupError(f"the key file cannot be read: {error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise StartupError(f"the key file {path} is not as it should be: {error}") from None
    for name, entry in entries.items():
        limit = entry.max_streams or max_streams
        tenant = Tenant(name, limit, entry.max_queued_tokens, entry.least_priority)
        yield from ((key, tenant) for key in entry.keys)


def _check(key: str, tenant: Tenant) -> None:
    """Refuse a key that no header can carry: nobody could ever use it."""
    if not key or len(key) > MAX_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise StartupError(
            f"an API key (of tenant {tenant.name!r}) cannot be sent in a header: "
            f"1 to {MAX_KEY_CHARACTERS} visible ASCII characters without spaces are needed"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, key=_SALT).digest()
