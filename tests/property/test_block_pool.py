"""The block pool with its prefix cache beside a naive model: lists, searched from end to end, and nothing clever."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.ids import BlockId
from shared.paging.block_hash import BlockHash
from shared.paging.pool import BlockPool

CONTENTS = [BlockHash(bytes([number]) * 16) for number in range(6)]


@dataclass(frozen=True)
class Stamped:
    """A block as somebody got it to write into."""

    block: BlockId
    stamp: int


class NaivePool:
    """Who holds what, in which order unheld blocks are given again, and what each one's content is called."""

    def __init__(self, blocks: int) -> None:
        self.blank = [BlockId(block) for block in reversed(range(blocks))]  # given from the end
        self.cached: list[BlockId] = []  # given from the start
        self.names: dict[BlockId, BlockHash] = {}
        self.given = [0] * blocks
        self.evictions = 0

    def take(self) -> BlockId:
        if self.blank:
            block = self.blank.pop()
        else:
            block = self.cached.pop(0)
            del self.names[block]
            self.evictions += 1
        self.given[block] += 1
        return block

    def hold(self, blocks: tuple[BlockId, ...]) -> None:
        self.cached = [block for block in self.cached if block not in blocks]
        self.blank = [block for block in self.blank if block not in blocks]

    def let_go(self, unheld: list[BlockId]) -> None:
        """Blocks that nobody holds any more, in the order of their table: the tail is to be given first."""
        self.cached += [block for block in reversed(unheld) if block in self.names]
        self.blank += [block for block in unheld if block not in self.names]

    def name(self, block: BlockId, content: BlockHash) -> None:
        self.names[block] = content
        if block in self.blank:
            self.blank.remove(block)
            self.cached.insert(0, block)

    def find(self, contents: list[BlockHash]) -> tuple[BlockId, ...]:
        found: list[BlockId] = []
        for content in contents:
            same = [block for block, name in self.names.items() if name == content]
            if not same:
                break
            found += same
        return tuple(found)


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_blocks_or_positions_is_refused(blocks: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"got {blocks} blocks of {block_tokens}"):
        BlockPool(blocks, block_tokens)


class PoolMachine(RuleBasedStateMachine):
    """Requests take blocks, find some, fill some, and leave; news of what was filled comes late or not at all."""

    @initialize(blocks=st.integers(1, 9))
    def begin(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, 4)
        self.naive = NaivePool(blocks)
        self.tables: list[list[BlockId]] = []
        self.written: list[Stamped] = []

    def holders(self, block: BlockId) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        held = {block for table in self.tables for block in table}
        given = self.pool.allocate(count)
        if count > self.pool.blocks - len(held):
            assert given is None
            return
        assert given == tuple(self.naive.take() for _ in range(count))
        assert held.isdisjoint(given), "a held block is given again"
        self.tables.append(list(given))
        self.written += [Stamped(block, self.pool.stamp(block)) for block in given]

    @rule(contents=st.lists(st.sampled_from(CONTENTS), max_size=4, unique=True), more=st.integers(0, 2))
    def find_hold_and_allocate(self, contents: list[BlockHash], more: int) -> None:
        """As an admission does: references first, so that nothing of what was found is evicted for the rest."""
        found = self.pool.found(contents)
        assert found == self.naive.find(contents)
        if more > self.pool.free_beside(found):
            return
        self.pool.hold(found)
        self.naive.hold(found)
        table = list(found)
        self.tables.append(table)
        given = self.pool.allocate(more)
        assert given == tuple(self.naive.take() for _ in range(more))
        assert set(given).isdisjoint(found)
        table += given
        self.written += [Stamped(block, self.pool.stamp(block)) for block in given]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self.naive.let_go([block for block in table if not self.holders(block)])

    @precondition(lambda self: self.written)
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def hear_that_a_block_was_filled(self, data: st.DataObject, content: BlockHash) -> None:
        """However late: if the block has been given to somebody else, the news is stale and names nothing."""
        fill = data.draw(st.sampled_from(self.written))
        is_fresh = self.naive.given[fill.block] == fill.stamp
        assert (self.pool.stamp(fill.block) == fill.stamp) == is_fresh
        if is_fresh and fill.block not in self.naive.names and content not in self.naive.names.values():
            self.naive.name(fill.block, content)
        self.pool.name(fill.block, fill.stamp, content)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """A new leader finds a table in a worker: any blocks that are named or nobody's."""
        blocks = st.integers(-1, self.pool.blocks).map(BlockId)
        table = data.draw(st.lists(blocks, min_size=1, max_size=4))
        is_possible = len(set(table)) == len(table) and all(
            0 <= block < self.pool.blocks and (block in self.naive.names or not self.holders(block)) for block in table
        )
        try:
            self.pool.adopt(table)
        except ValueError:
            assert not is_possible
            return
        assert is_possible
        self.naive.hold(tuple(table))
        self.tables.append(table)

    @rule(data=st.data())
    def release_what_nobody_holds(self, data: st.DataObject) -> None:
        """An error that changes nothing, wherever in the table the stranger stands."""
        free = [block for block in map(BlockId, range(-1, self.pool.blocks + 1)) if not self.holders(block)]
        mine = self.tables[0] if self.tables else []
        table = [*mine, data.draw(st.sampled_from(free))]
        try:
            self.pool.release(table)
        except ValueError:
            return
        raise AssertionError(f"{table} was released")

    @invariant()
    def every_block_is_blank_cached_or_held(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = {block for table in self.tables for block in table}
        assert self.pool.used == len(held)
        assert self.pool.cached == len(self.naive.cached)
        assert self.pool.free == len(self.naive.blank) + len(self.naive.cached)
        assert self.pool.used + self.pool.free == self.pool.blocks
        assert self.pool.free_blocks() == set(self.naive.blank) | set(self.naive.cached)
        for block in map(BlockId, range(self.pool.blocks)):
            assert self.pool.holders(block) == self.holders(block)
            assert self.pool.is_named(block) == (block in self.naive.names)
        assert self.pool.extra_holders == sum(map(len, self.tables)) - len(held)
        assert self.pool.evictions == self.naive.evictions

    @invariant()
    def names_are_unique_and_found(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert len(set(self.naive.names.values())) == len(self.naive.names)
        for block, content in self.naive.names.items():
            assert self.pool.found([content]) == (block,)
        assert all(not self.pool.found([c]) for c in CONTENTS if c not in self.naive.names.values())

    def teardown(self) -> None:
        """When all have left, everything is given again: blank ones, then what was used longest ago, tails first."""
        if not hasattr(self, "pool"):
            return
        while self.tables:
            table = self.tables.pop()
            self.pool.release(table)
            self.naive.let_go([block for block in table if not self.holders(block)])
        order = [*reversed(self.naive.blank), *self.naive.cached]
        assert self.pool.allocate(self.pool.blocks) == tuple(order)
        assert not any(self.pool.found([content]) for content in CONTENTS)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
