"""The blocks of one worker's KV memory: each is free, or held by one request."""

from collections.abc import Iterable

from shared.ids import BlockId


class BlockPool:
    """Free and held blocks; together they are always all there are. Gives back the block freed last first."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and positions, got {blocks} blocks of {block_tokens}")
        self.blocks = blocks
        self.block_tokens = block_tokens
        # A dict keeps order and removes any block in O(1), which adopting another leader's tables needs.
        self._free = dict.fromkeys(BlockId(block) for block in reversed(range(blocks)))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.blocks - len(self._free)

    @property
    def tokens(self) -> int:
        """Positions in the whole pool."""
        return self.blocks * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold this many positions."""
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> tuple[BlockId, ...] | None:
        """Take this many blocks, all or none (then None)."""
        if count > len(self._free):
            return None
        return tuple(self._free.popitem()[0] for _ in range(count))

    def adopt(self, blocks: Iterable[BlockId]) -> None:
        """Take these very blocks. Raises ValueError, and takes none, if one is not free: two tables would share it."""
        wanted = list(blocks)
        if len(set(wanted)) != len(wanted) or any(block not in self._free for block in wanted):
            raise ValueError(f"blocks {wanted} are not all free")
        for block in wanted:
            del self._free[block]

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Give blocks back, the last of a table first to be given again. Raises ValueError for one that is free."""
        for block in blocks:
            if block in self._free or not 0 <= block < self.blocks:
                raise ValueError(f"block {block} is not held")
            self._free[block] = None

    def free_blocks(self) -> frozenset[BlockId]:
        """Return the blocks that nobody holds, for the invariants."""
        return frozenset(self._free)
