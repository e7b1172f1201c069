"""The worker's side of the prefix cache: names of full blocks, hits that are checked, and blocks that are shared."""

import pytest

from services.worker.blocks import Blocks, BlocksDraft, Contradiction
from services.worker.executor import DrawFailed
from services.worker.plan_draft import Model
from services.worker.residents import Accepted, Ledger, Refused
from shared.ids import BlockId, RequestId
from shared.paging.block_hash import BlockHash, HashChain
from shared.paging.pool import BlockPool
from shared.protocol.messages import StepPlan, TokenRow, WorkerSize
from tests.unit.worker_plans import BLOCK, EOS, KEY, WORKER, claimed, new, piece, run, submit

NINE = tuple(range(10, 19))
A = RequestId("a")


def names_of(*token_ids: int, salt: str = "") -> list[BlockHash]:
    chain = HashChain(KEY, BLOCK, salt)
    chain.extend(token_ids)
    return chain.hashes


def named(on: Ledger) -> dict[int, bytes]:
    return {int(block): name for block, name in on._blocks.names.items()}


def with_nine() -> Ledger:
    """Request a of nine tokens runs in blocks 5, 2 and 7; it has drawn 42."""
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("a", NINE), 5, 2, 7),), slices=(piece("a", 0, 9),)), 42)
    return made


# -- names ------------------------------------------------------------------------------------------------------


def test_full_blocks_have_the_name_of_their_tokens_once_their_step_is_settled() -> None:
    made = claimed()
    accepted = made.accept(StepPlan(1, 1, new=(new(submit("a", NINE), 5, 2, 7),), slices=(piece("a", 0, 9),)))
    assert isinstance(accepted, Accepted)
    assert named(made) == {}
    made.settle(accepted, (42,))
    first, second = names_of(*NINE)
    assert named(made) == {5: first, 2: second}


def test_chunks_and_whole_prompts_name_the_same() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("a", NINE), 5, 2, 7),), slices=(piece("a", 0, 3),)))
    assert named(made) == {}
    run(made, StepPlan(1, 2, slices=(piece("a", 3, 4),)))
    assert set(named(made)) == {5}
    run(made, StepPlan(1, 3, slices=(piece("a", 7, 2),)), 42)
    assert named(made) == named(with_nine())


def test_generated_tokens_are_named_when_they_have_been_fed() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("a", (1, 2, 3)), 0),), slices=(piece("a", 0, 3),)), 42)
    assert named(made) == {}
    run(made, StepPlan(1, 2, slices=(piece("a", 3, 1),)), 43)
    assert named(made) == {0: names_of(1, 2, 3, 42)[0]}


@pytest.mark.parametrize("plan", [StepPlan(1, 2, released=(A,)), StepPlan(1, 2, preempted=(A,))], ids=["end", "rest"])
def test_a_name_outlives_the_table_it_stood_in(plan: StepPlan) -> None:
    made = with_nine()
    before = named(made)
    run(made, plan)
    assert named(made) == before != {}


def test_a_block_that_is_filled_in_the_step_that_ends_its_request_has_a_name() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("a", (1, 2, 3, 4)), 6),), slices=(piece("a", 0, 4),)), EOS)
    assert named(made) == {6: names_of(1, 2, 3, 4)[0]}


def test_a_row_that_could_not_draw_has_computed_its_block() -> None:
    made = claimed()
    plan = StepPlan(1, 1, new=(new(submit("a", (1, 2, 3, 4)), 6),), slices=(piece("a", 0, 4),))
    run(made, plan, DrawFailed("logits"))
    assert set(named(made)) == {6}


def test_nothing_is_named_for_a_slice_that_was_skipped_or_not_usable() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("a", (1, 2, 3)), 0),), slices=(piece("a", 0, 3),)), EOS)
    bad = submit("bad", (1, 2, 3, 100))
    _, rows, _ = run(made, StepPlan(1, 2, new=(new(bad, 1),), slices=(piece("a", 3, 1), piece("bad", 0, 4))))
    assert [(row.skipped, row.finish) for row in rows] == [(True, None), (False, "error")]
    assert named(made) == {}


def test_a_block_that_a_plan_hands_out_loses_its_name_when_the_plan_is_accepted() -> None:
    made = with_nine()
    run(made, StepPlan(1, 2, released=(A,)))
    plan = StepPlan(1, 3, new=(new(submit("b", (1, 2, 3)), 2),), slices=(piece("b", 0, 3),))
    assert isinstance(made.accept(plan), Accepted)
    assert set(named(made)) == {5}


def test_a_block_that_is_handed_to_one_who_has_ended_loses_its_name_too() -> None:
    made = with_nine()
    run(
        made, StepPlan(1, 2, new=(new(submit("b", (1, 2, 3)), 0),), slices=(piece("a", 9, 1), piece("b", 0, 3))), EOS, 1
    )
    run(made, StepPlan(1, 3, slices=(piece("a", 10, 1, 5),)))
    assert set(named(made)) == {2}


def test_a_plan_that_is_refused_changes_no_name() -> None:
    made = with_nine()
    before = named(made)
    plan = StepPlan(1, 2, released=(A,), new=(new(submit("b"), 2),), slices=(piece("ghost", 0, 1),))
    assert isinstance(made.accept(plan), Refused)
    assert named(made) == before


def test_other_salts_and_other_keys_make_other_names() -> None:
    made = claimed()
    plan = StepPlan(1, 1, new=(new(submit("a", NINE, cache_salt="mine"), 5, 2, 7),), slices=(piece("a", 0, 9),))
    run(made, plan, 42)
    assert list(named(made).values()) == names_of(*NINE, salt="mine")
    other = Ledger(WORKER, WorkerSize(8, BLOCK, 64), Model(frozenset(), vocabulary=100), b"another key")
    other.claim("nonce")
    run(other, plan, 42)
    unsalted = with_nine()
    assert len({*named(made).values(), *named(other).values(), *named(unsalted).values()}) == 6


# -- the snapshot -----------------------------------------------------------------------------------------------


def test_a_snapshot_tells_the_key_and_every_name_by_number_of_block() -> None:
    state = with_nine().claim("again")
    first, second = names_of(*NINE)
    assert state.hash_key == KEY
    assert [(one.block, one.content) for one in state.named] == [(2, second), (5, first)]


def test_of_two_blocks_with_one_content_the_shared_one_is_told_first_so_that_every_table_can_be_adopted() -> None:
    made = claimed()
    twins = (new(submit("a", NINE), 5, 6, 7), new(submit("twin", NINE), 0, 1, 2))
    run(made, StepPlan(1, 1, new=twins, slices=(piece("a", 0, 9), piece("twin", 0, 9))), 42, 42)
    run(made, StepPlan(1, 2, new=(new(submit("b", NINE), 5, 6, 3, start=8),), slices=(piece("b", 8, 1),)), 42)
    state = made.claim("again")
    assert [one.block for one in state.named] == [5, 6, 0, 1]
    pool = BlockPool(state.size.blocks, state.size.block_tokens, state.hash_key)
    for one in state.named:
        pool.name(one.block, pool.stamp(one.block), BlockHash(one.content))
    for resident in state.residents:
        pool.adopt(resident.table)
    assert [pool.holders(BlockId(block)) for block in (5, 6, 0, 1)] == [2, 2, 1, 1]


# -- hits -------------------------------------------------------------------------------------------------------


def test_a_hit_is_read_through_the_table_and_only_the_rest_is_fed() -> None:
    made = with_nine()
    plan = StepPlan(1, 2, new=(new(submit("b", (*NINE[:8], 1, 2)), 5, 2, 3, start=8),), slices=(piece("b", 8, 2),))
    accepted, _, batches = run(made, plan, 43)
    (row,) = accepted.batch
    assert (row.start, row.token_ids, row.table) == (8, (1, 2), (5, 2, 3))
    assert batches[0].rows == (TokenRow(RequestId("b"), 0, 0, (43,), cached_tokens=8),)


def test_generated_tokens_can_be_hit_by_the_next_turn() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("a", (1, 2, 3)), 0, 1),), slices=(piece("a", 0, 3),)), 42)
    run(made, StepPlan(1, 2, slices=(piece("a", 3, 1),)), EOS)
    turn = submit("turn", (1, 2, 3, 42, EOS, 7))
    accepted, _, _ = run(made, StepPlan(1, 3, new=(new(turn, 0, 2, start=4),), slices=(piece("turn", 4, 2),)), 8)
    assert accepted.batch[0].token_ids == (EOS, 7)


def test_every_token_row_tells_what_the_first_admission_found() -> None:
    made = with_nine()
    b = submit("b", (*NINE[:8], 1))
    run(made, StepPlan(1, 2, new=(new(b, 5, 2, 3, start=8),), slices=(piece("b", 8, 1),)), 43)
    _, _, batches = run(made, StepPlan(1, 3, slices=(piece("b", 9, 1),)), 44)
    assert batches[0].rows[0].cached_tokens == 8
    run(made, StepPlan(1, 4, preempted=(RequestId("b"),)))
    _, _, batches = run(made, StepPlan(1, 5, slices=(piece("b", 4, 7, 5, 3, 4),)), 45)
    assert batches[0].rows[0].cached_tokens == 8


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    made = with_nine()
    again = submit("b", NINE[:6], attempt=1, output_ids=(*NINE[6:8], 3))
    _, _, batches = run(made, StepPlan(1, 2, new=(new(again, 5, 2, 3, start=8),), slices=(piece("b", 8, 1),)), 43)
    assert batches[0].rows[0].cached_tokens == 6


def test_who_was_preempted_starts_behind_what_is_still_there() -> None:
    made = with_nine()
    run(made, StepPlan(1, 2, preempted=(A,)))
    accepted, _, _ = run(made, StepPlan(1, 3, slices=(piece("a", 8, 2, 5, 2, 0),)), 43)
    (row,) = accepted.batch
    assert (row.start, row.token_ids, row.table) == (8, (18, 42), (5, 2, 0))
    (resident,) = made.claim("again").residents
    assert (resident.computed, resident.table) == (10, (5, 2, 0))


def test_who_was_preempted_may_find_more_than_it_had_computed_itself() -> None:
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("a", NINE), 5, 2, 7),), slices=(piece("a", 0, 3),)))
    run(made, StepPlan(1, 2, preempted=(A,), new=(new(submit("b", NINE), 0, 1, 3),), slices=(piece("b", 0, 9),)), 1)
    accepted, _, _ = run(made, StepPlan(1, 3, slices=(piece("a", 8, 1, 0, 1, 4),)), 43)
    assert accepted.batch[0].table == (0, 1, 4)


def b_with(prompt: tuple[int, ...], *blocks: int, start: int) -> StepPlan:
    b = new(submit("b", prompt), *blocks, start=start)
    return StepPlan(1, 2, new=(b,), slices=(piece("b", start, len(prompt) - start),))


WRONG_HITS = {
    "other tokens": b_with((*NINE[:7], 1, 1), 5, 2, 3, start=8),
    "another order": b_with(NINE, 2, 5, 3, start=8),
    "a block that is not full": b_with((*NINE, 42, 1, 2, 3), 5, 2, 7, 3, start=12),
    "a block that nobody filled": b_with(NINE, 5, 0, 3, start=8),
    "a block that does not exist": b_with(NINE, 5, 8, 3, start=8),
    "a part of a block": b_with(NINE, 5, 2, 3, start=6),
    "all tokens": b_with(NINE[:8], 5, 2, start=8),
    "less than nothing": b_with(NINE, 5, 2, 3, start=-4),
    "more blocks than given": b_with(NINE, 5, start=8),
    "another salt": StepPlan(1, 2, new=(new(submit("b", NINE, cache_salt="s"), 5, 2, 3, start=8),)),
    "a block handed out by the same plan": StepPlan(
        1, 2, released=(A,), new=(new(submit("c"), 5), new(submit("b", NINE), 5, 2, 3, start=8))
    ),
    "the last block of another": b_with(NINE, 5, 2, 7, start=8),
    "a full block of another": b_with(NINE, 3, 2, 4, start=0),
    "one block twice": b_with(NINE, 3, 3, 4, start=0),
    "another's block for one who runs": StepPlan(
        1, 2, new=(new(submit("b", NINE), 0, 1, 3),), slices=(piece("b", 0, 9), piece("a", 9, 1, 0))
    ),
    "a start for one who still has its table": StepPlan(1, 2, slices=(piece("a", 8, 2, 0),)),
    "a start for a victim, without its content": StepPlan(1, 2, preempted=(A,), slices=(piece("a", 8, 2, 5, 7, 0),)),
    "a start for a victim, without its table": StepPlan(1, 2, preempted=(A,), slices=(piece("a", 8, 2),)),
}


@pytest.mark.parametrize("plan", WRONG_HITS.values(), ids=WRONG_HITS.keys())
def test_a_plan_whose_blocks_are_not_what_it_says_is_refused_and_leaves_no_trace(plan: StepPlan) -> None:
    made = with_nine()
    before = named(made)
    assert isinstance(made.accept(plan), Refused)
    state = made.claim("again")
    assert named(made) == before
    assert [(one.submit.request, one.computed, one.table) for one in state.residents] == [("a", 9, (5, 2, 7))]
    assert isinstance(made.accept(StepPlan(2, 1, slices=(piece("a", 9, 1),))), Accepted)


def test_nobody_writes_into_a_full_block_or_one_that_another_reads() -> None:
    blocks = Blocks(KEY, WorkerSize(4, BLOCK, 64))
    draft = BlocksDraft(blocks)
    draft.hand_out(A, [BlockId(0), BlockId(1)])
    draft.join([BlockId(0), BlockId(1)])
    draft.check_writable(A, BlockId(0))
    draft.enter()
    blocks.names[BlockId(0)] = names_of(1, 2, 3, 4)[0]
    with pytest.raises(Contradiction, match="which is full"):
        BlocksDraft(blocks).check_writable(A, BlockId(0))
    reader = BlocksDraft(blocks)
    reader.join([BlockId(1)])
    with pytest.raises(Contradiction, match="another's too"):
        reader.check_writable(A, BlockId(1))


# -- worked examples --------------------------------------------------------------------------------------------


def test_t35_kv_is_kept_until_the_scheduler_frees_it_and_freed_exactly_once() -> None:
    """Freed means: a plan may hand the block to another. The content stays, and its name, until one does."""
    made = with_nine()
    run(made, StepPlan(1, 2, new=(new(submit("b", NINE), 5, 2, 0, start=8),), slices=(piece("b", 8, 1),)), 42)
    tables = [made._blocks.tables(BlockId(block)) for block in (5, 2, 7, 0)]
    assert tables == [2, 2, 1, 1]
    run(made, StepPlan(1, 3, released=(A,)))
    run(made, StepPlan(1, 4, released=(A,)))
    assert [made._blocks.tables(BlockId(block)) for block in (5, 2, 7, 0)] == [1, 1, 0, 1]
    thief = StepPlan(1, 5, new=(new(submit("c", NINE), 7, 5, 3),), slices=(piece("c", 0, 9),))
    assert isinstance(made.accept(thief), Refused)
    made.claim("again")
    run(made, StepPlan(2, 1, released=(RequestId("b"),)))
    taken = StepPlan(2, 2, new=(new(submit("c", NINE), 7, 5, 3),), slices=(piece("c", 0, 9),))
    run(made, taken, 1)
    assert made.claim("third").residents[0].table == (7, 5, 3)


def test_t44_two_samples_share_full_blocks_by_reference_and_each_writes_a_last_block_of_its_own() -> None:
    """PagedAttention lets both hold the unfilled last block as well and copies it when the first of them writes.

    Here only full blocks are ever shared, and they are never written again: so nothing is copied. The second sample
    computes the tokens of the last block a second time instead (at most 16), and neither waits for the other's copy.
    """
    seven = (1, 2, 3, 4, 5, 6, 7)
    made = claimed()
    run(made, StepPlan(1, 1, new=(new(submit("id/0", seven), 0, 1),), slices=(piece("id/0", 0, 7),)), 50)
    second = new(submit("id/1", seven), 0, 2, start=4)
    accepted, _, _ = run(made, StepPlan(1, 2, new=(second,), slices=(piece("id/0", 7, 1), piece("id/1", 4, 3))), 51, 60)
    assert [(row.table, row.token_ids) for row in accepted.batch] == [((0, 1), (50,)), ((0, 2), (5, 6, 7))]
    assert [made._blocks.tables(BlockId(block)) for block in (0, 1, 2)] == [2, 1, 1]
    accepted, _, _ = run(made, StepPlan(1, 3, slices=(piece("id/0", 8, 1, 3), piece("id/1", 7, 1))), 52, 61)
    assert named(made) == {0: names_of(*seven)[0], 1: names_of(*seven, 50)[1], 2: names_of(*seven, 60)[1]}
    shared_last = new(submit("id/2", seven), 0, 1, start=4)
    assert isinstance(made.accept(StepPlan(1, 4, new=(shared_last,), slices=(piece("id/2", 4, 3),))), Refused)
