"""Whose request it is, and what is allowed to whom: limits of a key's own, beside those of the gateway."""

import hashlib
from dataclasses import dataclass

from shared.errors import InvalidParameter

DIGEST_BYTES = 8
MOST_URGENT = -100
"""The smallest ``priority`` there is."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One client as the pool tells them apart. ``None``: nothing beside the gateway's own limits holds for it."""

    name: str
    max_streams: int | None = None
    """Requests under way at once, streamed or not."""
    max_queued_tokens: int | None = None
    """Tokens of prompts that wait for their first token."""
    least_priority: int = MOST_URGENT
    """The most urgent that its requests may ask to be."""

    def check_priority(self, priority: int) -> None:
        """Raise InvalidParameter for a request that asks to be more urgent than its key may."""
        if priority < self.least_priority:
            raise InvalidParameter(f"priority: this key may ask for {self.least_priority} or more", param="priority")


def bearer_of(authorization: str | None) -> bytes:
    """Return the bearer token of this header, empty without one."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer":
        return b""
    return token.strip().encode(errors="surrogateescape")  # how aiohttp decodes bytes that are not UTF-8


def tenant_of(authorization: str | None) -> str:
    """Return 16 hexadecimal digits for the bearer token of this header, "" without one.

    The token itself goes nowhere: it is a secret. Every gateway gives a token the same digest, so that a client counts
    as one however it reaches the pool.
    """
    token = bearer_of(authorization)
    return hashlib.blake2b(token, digest_size=DIGEST_BYTES, person=b"tenant").hexdigest() if token else ""
