"""Whose request it is. Until there are keys to check, whatever a client sends as its key tells clients apart."""

import hashlib

DIGEST_BYTES = 8


def tenant_of(authorization: str | None) -> str:
    """Return 16 hexadecimal digits for the bearer token of this header, "" without one.

    The token itself goes nowhere: it is a secret. Every gateway gives a token the same digest, so that a client counts
    as one however it reaches the pool.
    """
    scheme, _, token = (authorization or "").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        return ""
    data = token.encode(errors="surrogateescape")  # how aiohttp decodes bytes of a header that are not UTF-8
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"tenant").hexdigest()
