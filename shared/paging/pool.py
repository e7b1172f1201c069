"""The blocks of one worker's KV memory, and which of them can be read again by another request (PagedAttention §3)."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from shared.ids import BlockId
from shared.paging.block_hash import BlockHash


class BlockPool:
    """Every block is blank, cached (its content has a name, nobody holds it), or held by one or more requests.

    Only blocks with a name are ever shared. A new block is taken from the blank ones, the one freed last first; when
    there is none, the cached block that was used longest ago loses its name.
    """

    def __init__(self, blocks: int, block_tokens: int, hash_key: bytes = b"") -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and positions, got {blocks} blocks of {block_tokens}")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.hash_key = hash_key
        # A dict keeps order and removes any block in O(1), which adopting another leader's tables needs.
        self._blank = dict.fromkeys(BlockId(block) for block in reversed(range(blocks)))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._holders = [0] * blocks
        self._stamps = [0] * blocks
        self.extra_holders = 0
        """References beyond the first, over all blocks: how many blocks sharing saves."""
        self.evictions = 0
        """Cached blocks that lost their name because somebody needed the room."""
        self._named: dict[BlockHash, BlockId] = {}
        self._names: dict[BlockId, BlockHash] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.blocks - self.free

    @property
    def tokens(self) -> int:
        """Positions in the whole pool."""
        return self.blocks * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold this many positions."""
        return -(-tokens // self.block_tokens)

    # -- giving and taking --------------------------------------------------------------------------------------

    def allocate(self, count: int) -> tuple[BlockId, ...] | None:
        """Take this many blocks to write into, all or none (then None)."""
        if count > self.free:
            return None
        return tuple(self._take() for _ in range(count))

    def found(self, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """Return the blocks that hold the longest known beginning of these contents. Takes nothing."""
        blocks = []
        for name in hashes:
            block = self._named.get(name)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def free_beside(self, blocks: Iterable[BlockId]) -> int:
        """Return how many blocks could be allocated once these have been taken."""
        return self.free - sum(not self._holders[block] for block in blocks)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Take one more reference on blocks that `found` returned."""
        for block in blocks:
            self._cached.pop(block, None)
            self.extra_holders += self._holders[block] > 0
            self._holders[block] += 1

    def release(self, table: Sequence[BlockId]) -> None:
        """Give back one reference on each block, from the tail, which is thus the first to be given again.

        Raises ValueError for a block that nobody holds.
        """
        for block in table:
            if not 0 <= block < self.blocks or not self._holders[block]:
                raise ValueError(f"block {block} is not held")
        for block in reversed(table):
            self._holders[block] -= 1
            self.extra_holders -= self._holders[block] > 0
            if not self._holders[block] and block in self._names:
                self._cached[block] = None
        for block in table:  # the blank ones are a stack: the tail must come last
            if not self._holders[block] and block not in self._names:
                self._blank[block] = None

    def _take(self) -> BlockId:
        if self._blank:
            block = self._blank.popitem()[0]
        else:
            block = self._cached.popitem(last=False)[0]
            del self._named[self._names.pop(block)]
            self.evictions += 1
        self._holders[block] = 1
        self._stamps[block] += 1
        return block

    # -- names --------------------------------------------------------------------------------------------------

    def stamp(self, block: BlockId) -> int:
        """Return a number that changes whenever the block is given to be written by somebody else."""
        return self._stamps[block]

    def name(self, block: BlockId, stamp: int, content: BlockHash) -> None:
        """Let a full block be found by its content, unless it has been given away since ``stamp``.

        Of two blocks with the same content the first keeps the name.
        """
        if self._stamps[block] != stamp or block in self._names or content in self._named:
            return
        self._named[content] = block
        self._names[block] = content
        if block in self._blank:  # its request has left: it is the tail of what that one leaves behind
            del self._blank[block]
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)

    # -- another leader's tables --------------------------------------------------------------------------------

    def adopt(self, table: Sequence[BlockId]) -> None:
        """Hold these very blocks. Raises ValueError, and holds none, if one without a name would be shared."""
        if len(set(table)) != len(table):
            raise ValueError(f"table {list(table)} names a block twice")
        for block in table:
            if not 0 <= block < self.blocks or (self._holders[block] and block not in self._names):
                raise ValueError(f"block {block} cannot be held: it is another's, or there is none")
        for block in table:
            self._blank.pop(block, None)
        self.hold(table)

    # -- for the invariants -------------------------------------------------------------------------------------

    def holders(self, block: BlockId) -> int:
        """Return how many requests hold a block."""
        return self._holders[block]

    def is_named(self, block: BlockId) -> bool:
        """Return whether a block can be found by its content: it is full, and nobody may write it."""
        return block in self._names

    def free_blocks(self) -> frozenset[BlockId]:
        """Return the blocks that nobody holds, cached ones included."""
        return frozenset(self._blank) | frozenset(self._cached)
