"""What a worker knows of its blocks: the names of the full ones, and in how many tables of live requests each stands.

A name outlives its request: the content stays until a plan hands the block out again.
"""

from collections.abc import Iterable, Sequence

from shared.ids import BlockId, RequestId
from shared.paging.block_hash import BlockHash, HashChain
from shared.protocol.messages import NamedBlock, WorkerSize


class Contradiction(Exception):
    """A plan names something that cannot be so: a bug of its writer, or not meant for this worker.

    It never leaves the ledger: there it becomes a refusal with this text.
    """


class Blocks:
    """The blocks of one life of a worker. Names are made with ``hash_key``, which is that life's own."""

    def __init__(self, hash_key: bytes, size: WorkerSize) -> None:
        self.hash_key = hash_key
        self.count = size.blocks
        self.block_tokens = size.block_tokens
        self.names: dict[BlockId, BlockHash] = {}
        self._tables = [0] * size.blocks

    def chain(self, salt: str) -> HashChain:
        """Return what names the blocks of a request with this cache salt."""
        return HashChain(self.hash_key, self.block_tokens, salt)

    def tables(self, block: BlockId) -> int:
        """Return how many live requests have a block in their table."""
        return self._tables[block]

    def count_table(self, block: BlockId, change: int) -> None:
        """Note that a block stands in so many more tables."""
        self._tables[block] += change

    def leave(self, table: Iterable[BlockId]) -> None:
        """Note that a request has no table any more. What is in the blocks stays, and so do their names."""
        for block in table:
            self._tables[block] -= 1

    def named(self) -> tuple[NamedBlock, ...]:
        """Return all full blocks whose content is known.

        Those in several tables come first, then all by number: of two blocks with one content a leader lets only the
        first be shared, and that must be the one that is.
        """
        in_order = sorted(self.names, key=lambda block: (self._tables[block] < 2, block))  # noqa: PLR2004 - several
        return tuple(NamedBlock(block, self.names[block]) for block in in_order)


class BlocksDraft:
    """What one plan does to blocks: every method but `enter` checks and notes, and changes nothing."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._handed_out: set[BlockId] = set()
        self._changes: dict[BlockId, int] = {}

    def leave(self, table: Iterable[BlockId]) -> None:
        """Note that a request has no table any more."""
        self._count(table, -1)

    def hand_out(self, request: RequestId, blocks: Sequence[BlockId]) -> None:
        """Note that a request gets these blocks to write into: their names go. Raises Contradiction for one in use."""
        self._check_range(request, blocks)
        for block in blocks:
            if block in self._handed_out or self._tables(block):
                raise Contradiction(f"request {request}: block {block} is new, but another's")
            self._handed_out.add(block)

    def share(self, request: RequestId, blocks: Sequence[BlockId], expected: Sequence[BlockHash]) -> None:
        """Check that these blocks hold what a request would otherwise compute. Raises Contradiction if one does not."""
        self._check_range(request, blocks)
        if [self._name(block) for block in blocks] != list(expected):
            raise Contradiction(f"request {request}: blocks {list(blocks)} do not hold the beginning of its tokens")

    def join(self, table: Iterable[BlockId]) -> None:
        """Note that a live request has these blocks in its table."""
        self._count(table, 1)

    def check_writable(self, request: RequestId, block: BlockId) -> None:
        """Raise Contradiction unless nobody but the one who writes can read this block."""
        if self._name(block) is not None:
            raise Contradiction(f"request {request} writes into block {block}, which is full")
        if self._tables(block) != 1:
            raise Contradiction(f"request {request} writes into block {block}, which is another's too")

    def enter(self) -> None:
        """Make all that was noted so."""
        for block in self._handed_out:
            self._blocks.names.pop(block, None)
        for block, change in self._changes.items():
            self._blocks.count_table(block, change)

    def _count(self, table: Iterable[BlockId], change: int) -> None:
        for block in table:
            self._changes[block] = self._changes.get(block, 0) + change

    def _tables(self, block: BlockId) -> int:
        return self._blocks.tables(block) + self._changes.get(block, 0)

    def _name(self, block: BlockId) -> BlockHash | None:
        return None if block in self._handed_out else self._blocks.names.get(block)

    def _check_range(self, request: RequestId, blocks: Sequence[BlockId]) -> None:
        if any(not 0 <= block < self._blocks.count for block in blocks):
            raise Contradiction(f"request {request}: a block beyond the {self._blocks.count} there are")
