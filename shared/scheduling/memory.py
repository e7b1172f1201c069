"""What an admission finds in a worker's KV memory, and what it takes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.ids import BlockId
from shared.paging.block_hash import BlockHash
from shared.paging.pool import BlockPool
from shared.paging.reservation import KvManager
from shared.scheduling.limits import WATERMARK
from shared.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Memory:
    """One worker's blocks under one way to give them. Looks only: what is decided is taken from the pool itself."""

    pool: BlockPool
    kv: KvManager

    def found(self, request: Request) -> tuple[BlockId, ...]:
        """Return the blocks that hold the request's beginning."""
        return self.pool.found(self._names(request)[: self._useful(request)])

    def new_blocks(self, request: Request, found: tuple[BlockId, ...]) -> int:
        """Return how many blocks an admission takes beside those found."""
        footprint = request.footprint
        tokens = footprint.most_tokens if request.is_protected else self.kv.set_aside(footprint)
        return self.pool.blocks_for(tokens) - len(found)

    def kept_free(self, others: int) -> int:
        """Return how many blocks an admission must leave for the next tokens of so many who run."""
        return int(WATERMARK * self.pool.blocks) if self.kv.is_on_demand and others else 0

    def lacking(self, request: Request, found: tuple[BlockId, ...], others: int) -> int:
        """Return how many blocks must be freed before the request may begin beside others; 0 or less if it may."""
        return self.new_blocks(request, found) + self.kept_free(others) - self.pool.free_beside(found)

    def unheld(self, blocks: tuple[BlockId, ...]) -> int:
        """Return how many of these blocks nobody holds."""
        return self.pool.free - self.pool.free_beside(blocks)

    def misses_more_than(self, tokens: int, request: Request) -> bool:
        """Return whether a waiting request would have to be fed more than so many before it samples, if it began now.

        Asked of everyone who waits, in each plan. So the one block is looked up first that most of them lack.
        """
        beyond = request.missing_tokens - tokens
        if beyond <= 0:
            return False
        needed = self.pool.blocks_for(beyond)
        names = self._names(request)
        if needed > min(len(names), self._useful(request)):
            return True
        return not self.pool.found((names[needed - 1],)) or len(self.pool.found(names[:needed])) < needed

    def _useful(self, request: Request) -> int:
        """Return how many of its blocks may be found: its last token is always computed."""
        return (request.total_tokens - 1) // self.pool.block_tokens

    def _names(self, request: Request) -> Sequence[BlockHash]:
        """Return what its full blocks are called; nothing if it must find none of them."""
        if request.prefix is None or not request.finds_prefix or not self.kv.is_on_demand:
            return ()
        return request.prefix.hashes(self.pool.hash_key, self.pool.block_tokens)
