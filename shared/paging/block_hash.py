"""Names of block contents: a block's hash covers its tokens and all that stand before it (PagedAttention's chain).

A hash is 128 bits, keyed: who does not know the worker's key cannot make two contents with one name.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import NewType, Protocol

BlockHash = NewType("BlockHash", bytes)
HASH_BYTES = 16
TOKEN_BYTES = 8


class Prefix(Protocol):
    """What is known of a request's contents: the hashes of its full blocks, from the first on."""

    def hashes(self, key: bytes, block_tokens: int) -> Sequence[BlockHash]:
        """Return one hash for each full block of the tokens known, under this worker's key and block size."""


class HashChain:
    """Hashes of the full blocks of one growing sequence. Sequences with different salts share nothing."""

    def __init__(self, key: bytes, block_tokens: int, salt: str = "") -> None:
        self.hashes: list[BlockHash] = []
        self.tokens = 0
        """Tokens taken so far, those of the last, partial block included."""
        self._key = key
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._parent = blake2b(salt.encode(), key=key, digest_size=HASH_BYTES).digest()
        self._rest = b""
        self._is_hashable = True

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens. From an id on that no model has (negative, or beyond 64 bits) nothing gets a hash."""
        self.tokens += len(token_ids)
        if not self._is_hashable:
            return
        try:
            packed = struct.pack(f"<{len(token_ids)}Q", *token_ids)
        except struct.error:
            self._is_hashable = False
            packed = b"".join(struct.pack("<Q", token) for token in takewhile(_is_possible, token_ids))
        data = self._rest + packed
        full = len(data) - len(data) % self._block_bytes
        for start in range(0, full, self._block_bytes):
            block = self._parent + data[start : start + self._block_bytes]
            self._parent = blake2b(block, key=self._key, digest_size=HASH_BYTES).digest()
            self.hashes.append(BlockHash(self._parent))
        self._rest = data[full:]


def _is_possible(token: int) -> bool:
    return 0 <= token < 1 << 8 * TOKEN_BYTES


class TokenPrefix:
    """The hashes of a request whose tokens are known, made when they are first asked for."""

    def __init__(self, token_ids: Iterable[int], salt: str = "") -> None:
        self._token_ids = list(token_ids)
        self._salt = salt
        self._chains: dict[tuple[bytes, int], HashChain] = {}

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens that were generated."""
        self._token_ids.extend(token_ids)

    def hashes(self, key: bytes, block_tokens: int) -> Sequence[BlockHash]:
        """Return one hash for each full block of the tokens known."""
        chain = self._chains.get((key, block_tokens))
        if chain is None:
            chain = self._chains[key, block_tokens] = HashChain(key, block_tokens, self._salt)
        if chain.tokens < len(self._token_ids):
            chain.extend(self._token_ids[chain.tokens :])
        return chain.hashes
