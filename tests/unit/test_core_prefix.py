"""Names of block contents, and what the planner does with them."""

from hashlib import blake2b

import pytest

from shared.ids import RequestId, WorkerId
from shared.paging.block_hash import BlockHash, HashChain, TokenPrefix
from shared.paging.pool import BlockPool
from shared.paging.reservation import KV_MANAGERS
from shared.scheduling.limits import Limits
from shared.scheduling.planner import Outcome, Planner
from shared.scheduling.policies import POLICIES
from shared.scheduling.request import Request
from shared.scheduling.state import WorkerView
from tests.harness import Bench

KEY = b"key"


def names(token_ids: list[int], *, key: bytes = KEY, block: int = 4, salt: str = "") -> list[BlockHash]:
    return list(TokenPrefix(token_ids, salt).hashes(key, block))


def test_only_full_blocks_have_a_name_and_it_has_128_bits() -> None:
    assert [len(names(list(range(count)))) for count in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert all(len(name) == 16 for name in names(list(range(9))))


def test_a_name_covers_all_that_stands_before_its_block() -> None:
    one, other = names([1, 2, 3, 4, 5, 6, 7, 8]), names([1, 2, 3, 9, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert one == names([1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize("change", [{"key": b"other key"}, {"salt": "salt"}])
def test_another_key_or_salt_shares_no_name(change: dict[str, object]) -> None:
    tokens = list(range(12))
    other = names(tokens, **change)  # type: ignore[arg-type]  # one of two keywords, each with its own type
    assert set(names(tokens)).isdisjoint(other)


def test_block_sizes_have_names_of_their_own_from_one_prefix() -> None:
    prefix = TokenPrefix(range(12))
    assert [len(prefix.hashes(KEY, block)) for block in (2, 3, 4, 6)] == [6, 4, 3, 2]
    assert list(prefix.hashes(KEY, 4)) == names(list(range(12)))
    assert set(prefix.hashes(KEY, 2)).isdisjoint(prefix.hashes(KEY, 4))


@pytest.mark.parametrize("cuts", [[1], [4], [3, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 0, 12]])
def test_tokens_in_pieces_are_named_as_at_once(cuts: list[int]) -> None:
    tokens = list(range(12))
    prefix, chain = TokenPrefix([]), HashChain(KEY, 4)
    for start, end in zip([0, *cuts], [*cuts, 12], strict=True):
        prefix.append(tokens[start:end])
        chain.extend(tokens[start:end])
        assert list(prefix.hashes(KEY, 4)) == chain.hashes == names(tokens[:end])


@pytest.mark.parametrize("impossible", [-1, 1 << 64])
@pytest.mark.parametrize("cuts", [[], [4], [6], [7], [2, 9]])
def test_from_an_id_that_no_model_has_nothing_has_a_name_however_it_came(impossible: int, cuts: list[int]) -> None:
    tokens = [1, 2, 3, 4, 5, 6, impossible, 8, 9, 10, 11, 12]
    chain = HashChain(KEY, 4)
    for start, end in zip([0, *cuts], [*cuts, 12], strict=True):
        chain.extend(tokens[start:end])
    assert chain.hashes == names([1, 2, 3, 4])
    assert chain.tokens == 12


@pytest.mark.parametrize("possible", [0, (1 << 64) - 1])
def test_the_smallest_and_the_largest_id_of_64_bits_are_possible(possible: int) -> None:
    tokens = [possible] * 4
    assert len(names(tokens)) == 1
    assert names([*tokens, -1]) == names(tokens)


def test_a_name_is_the_keyed_hash_of_the_name_before_it_and_its_own_tokens_and_the_first_one_follows_the_salt() -> None:
    """The parts of a pool agree on names without sharing code in memory: what is hashed must never change unnoticed."""

    def keyed(*parts: bytes) -> bytes:
        return blake2b(b"".join(parts), key=KEY, digest_size=16).digest()

    def packed(*token_ids: int) -> bytes:
        return b"".join(token.to_bytes(8, "little") for token in token_ids)

    first = keyed(keyed(b"salt"), packed(1, 2, 3, 1 << 40))
    second = keyed(first, packed(5, 6, 7, 8))
    assert names([1, 2, 3, 1 << 40, 5, 6, 7, 8], salt="salt") == [first, second]


# -- in the planner -------------------------------------------------------------------------------------------------


class Asked:
    """A prefix that notes how many of its names were looked at."""

    def __init__(self, names_of: list[BlockHash]) -> None:
        self.names = names_of

    def hashes(self, key: bytes, block_tokens: int) -> list[BlockHash]:
        assert (key, block_tokens) == (KEY, 4)
        return self.names


@pytest.mark.parametrize(("prompt", "found"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_token_is_always_computed_though_its_block_could_be_found(prompt: int, found: int) -> None:
    content = [BlockHash(bytes([number]) * 16) for number in range(3)]
    pool = BlockPool(10, 4, KEY)
    for block, name in zip(pool.allocate(3) or (), content, strict=True):
        pool.name(block, pool.stamp(block), name)
    planner = Planner(POLICIES["sarathi"], Limits(64, 8), KV_MANAGERS["paged"])
    planner.add_worker(WorkerView(WorkerId("w"), pool, 1000))
    planner.submit(Request(RequestId("r"), 1, (0, 0), prompt, 4, prefix=Asked(content[: prompt // 4])))
    step = planner.next_step(WorkerId("w"))
    assert step.admitted[0].start == 4 * found
    assert step.slices[0].count == prompt - 4 * found >= 1
    assert (planner.state.prefix_queries, planner.state.prefix_hits) == (prompt, 4 * found)


def test_a_prompt_whose_beginning_has_a_hole_is_as_long_as_what_stands_behind_the_hole() -> None:
    """Budget 16, cap 4. Of 13 tokens the first and the third block are known: 9 tokens are missing, not one."""
    content = [BlockHash(bytes([number]) * 16) for number in range(3)]
    pool = BlockPool(100, 4, KEY)
    first, third = pool.allocate(2) or ()
    pool.name(first, pool.stamp(first), content[0])
    pool.name(third, pool.stamp(third), content[2])
    planner = Planner(POLICIES["sarathi"], Limits(16, 8, long_prefill_tokens=4), KV_MANAGERS["paged"])
    planner.add_worker(WorkerView(WorkerId("w"), pool, 1000))
    planner.submit(Request(RequestId("long"), 1, (0, 0), 40, 4))
    planner.submit(Request(RequestId("hole"), 1, (1, 0), 13, 4, prefix=Asked(content)))
    planner.submit(Request(RequestId("short"), 1, (2, 0), 3, 4))
    fed = {slice_.request: slice_.count for slice_ in planner.next_step(WorkerId("w")).slices}
    assert fed == {"long": 4 + 9, "short": 3}


def test_a_prompt_that_is_found_up_to_its_last_block_is_short() -> None:
    """Budget 16, cap 4. Of 13 tokens three blocks are known: one token is missing."""
    content = [BlockHash(bytes([number]) * 16) for number in range(3)]
    pool = BlockPool(100, 4, KEY)
    for block, name in zip(pool.allocate(3) or (), content, strict=True):
        pool.name(block, pool.stamp(block), name)
    planner = Planner(POLICIES["sarathi"], Limits(16, 8, long_prefill_tokens=4), KV_MANAGERS["paged"])
    planner.add_worker(WorkerView(WorkerId("w"), pool, 1000))
    planner.submit(Request(RequestId("long"), 1, (0, 0), 40, 4))
    planner.submit(Request(RequestId("known"), 1, (1, 0), 13, 4, prefix=Asked(content)))
    planner.submit(Request(RequestId("short"), 1, (2, 0), 3, 4))
    fed = {slice_.request: slice_.count for slice_ in planner.next_step(WorkerId("w")).slices}
    assert fed == {"long": 4 + 8, "known": 1, "short": 3}


def test_what_newcomers_look_up_and_find_is_added_up() -> None:
    bench = Bench("sarathi", block=4)
    for name in ("one", "two", "three"):
        bench.arrive(name, [*range(9), ord(name[1])], 9)
        bench.iterate()
    bench.arrive("shares nothing", 10, 9)
    bench.iterate()
    assert (bench.planner.state.prefix_queries, bench.planner.state.prefix_hits) == (3 * 10, 2 * 8)


def test_under_reserve_nothing_is_shared_and_nothing_is_named() -> None:
    bench = Bench("orca", block=4, kv="reserve")
    for name in ("one", "two"):
        bench.arrive(name, range(9), 3)
        assert bench.iterate()[name] == 9
    assert bench.worker.pool.cached == 0
    bench.run_dry()
    assert bench.worker.pool.cached == 0


def test_what_was_generated_is_found_by_the_next_turn_of_a_chat() -> None:
    bench = Bench("sarathi", block=4)
    bench.arrive("first turn", range(6), 7)
    bench.iterate_times(7)
    held = bench.model.held[RequestId("first turn")]
    answer = held.output
    bench.iterate()
    second = bench.arrive("second turn", [*range(6), *answer, 90, 91], 2)
    bench.iterate()
    assert bench.steps[-1].admitted[0].start == 12  # 6 + 7 - 1 are computed: three full blocks
    assert second.footprint.known_tokens == 15 + 1


def test_different_salts_share_nothing_and_equal_ones_do() -> None:
    bench = Bench("sarathi", block=4)
    bench.arrive("one", range(9), 1, salt="a")
    bench.iterate()
    bench.arrive("other salt", range(9), 1, salt="b")
    assert bench.iterate() == {"other salt": 9}
    bench.arrive("same salt", range(9), 1, salt="a")
    assert bench.iterate() == {"same salt": 1}


def test_two_in_one_step_share_nothing_yet_and_the_first_keeps_the_name() -> None:
    bench = Bench("sarathi", block=4)
    one, two = bench.arrive("one", range(9), 9), bench.arrive("two", range(9), 9)
    assert bench.iterate() == {"one": 9, "two": 9}
    assert set(one.blocks).isdisjoint(two.blocks)
    third = bench.arrive("three", range(9), 9)
    bench.iterate()
    assert third.blocks[:2] == one.blocks[:2]


def test_a_block_is_found_only_when_the_result_of_the_step_that_filled_it_has_been_read() -> None:
    bench = Bench("sarathi", block=4)
    bench.arrive("one", range(9), 9)
    bench.plan()
    bench.arrive("early", range(9), 1)
    assert bench.plan() == {"one": 1, "early": 9}
    bench.read()
    bench.arrive("in time", range(9), 1)
    assert bench.plan()["in time"] == 1


def test_what_a_preempted_request_left_is_named_if_nobody_else_was_given_it_and_it_finds_it_again() -> None:
    """Four blocks of 4: A has 8 tokens, B 7. B gives way in the plan after, its first result not read."""
    bench = Bench("sarathi", blocks=4, block=4)
    bench.arrive("A", range(8), 4)
    bench.arrive("B", range(50, 57), 6)
    bench.plan()
    assert bench.plan() == {"A": 1}
    assert bench.steps[-1].preempted == ("B",)
    bench.read()
    bench.read()
    while "B" not in (fed := bench.iterate()):
        pass
    assert fed["B"] == 4  # 7 and the token it had sampled, less the first block
    bench.run_dry()


def test_a_skipped_slice_names_nothing() -> None:
    """It ended by itself in step 1: what step 2 fed it was never computed, though it would have filled a block."""
    bench = Bench("sarathi", block=4)
    bench.arrive("ends early", range(7), 1, max_tokens=9)
    bench.plan()
    bench.plan()
    bench.read()
    bench.read()
    assert bench.worker.pool.cached == 1  # of 7 tokens; the eighth was skipped


def test_news_of_an_earlier_attempt_ends_nobody() -> None:
    planner = Planner(POLICIES["sarathi"], Limits(64, 8), KV_MANAGERS["paged"])
    planner.add_worker(WorkerView(WorkerId("w"), BlockPool(10, 4), 1000))
    planner.submit(Request(RequestId("r"), 1, (0, 0), 4, 4))
    planner.next_step(WorkerId("w"))
    planner.end(RequestId("r"))
    planner.submit(Request(RequestId("r"), 2, (0, 0), 4, 4))
    assert planner.next_step(WorkerId("w")).released == (RequestId("r"),)
    assert planner.settle(WorkerId("w"), [Outcome(RequestId("r"), 1, ended=True)]) == ()
    assert planner.settle(WorkerId("w"), [Outcome(RequestId("r"), 2, ended=True)]) == (RequestId("r"),)
