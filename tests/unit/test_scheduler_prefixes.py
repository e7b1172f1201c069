"""The leader and the prefix cache: what it finds, what it names, and what another leader learns of it."""

from shared.ids import BlockId, RequestId
from shared.paging.block_hash import HashChain
from shared.protocol.messages import Finish, NamedBlock, ResultRow, StepPlan, StepResult
from tests.unit.leader_desk import KEY, SIZE, Desk, W, make_desk, submission

PROMPT = 9  # two full blocks of four, and one token


def answer(desk: Desk, plan: StepPlan, token: int, *, finish: Finish | None = None, skipped: bool = False) -> None:
    """Answer as a worker does that has this one request in the plan, drawing a token."""
    ids = () if skipped else (token,)
    rows = tuple(ResultRow(slice_.request, 1, ids, finish, skipped) for slice_ in plan.slices)
    desk.leader.hear(W, StepResult(plan.epoch, plan.step, 0.01, rows), desk.now_s)


def run_one(desk: Desk, *, finish: Finish = "stop") -> StepPlan:
    """Let one request run for a single step."""
    desk.submit(submission("first", prompt=PROMPT))
    plan = desk.must_plan()
    answer(desk, plan, 50, finish=finish)
    return plan


def test_a_second_request_begins_where_the_first_one_s_full_blocks_end() -> None:
    desk = make_desk()
    desk.claim()
    first = run_one(desk)
    desk.submit(submission("second", prompt=PROMPT))
    second = desk.must_plan()
    assert second.new[0].start == 8
    assert second.new[0].blocks[:2] == first.new[0].blocks[:2]
    assert [(s.start, s.count) for s in second.slices] == [(8, 1)]


def test_the_last_token_is_always_computed() -> None:
    desk = make_desk()
    desk.claim()
    run_one(desk)
    desk.submit(submission("second", prompt=8))
    assert desk.must_plan().new[0].start == 4


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    desk = make_desk()
    desk.claim()
    desk.submit(submission("first", prompt=6, max_tokens=3))
    for token in (50, 51, 52):
        answer(desk, desk.must_plan(), token, finish="length" if token == 52 else None)
    turn = submission("second", prompt=6)
    ids = (*turn.prompt_ids, 50, 51, 52, 60)
    desk.submit(type(turn)(turn.request, 1, turn.gateway, ids, 4))
    assert desk.must_plan().new[0].start == 8, "50 and 51 were fed, 52 was not"


def test_another_salt_finds_nothing() -> None:
    desk = make_desk()
    desk.claim()
    run_one(desk)
    other = submission("second", prompt=PROMPT)
    desk.submit(type(other)(other.request, 1, other.gateway, other.prompt_ids, 4, cache_salt="mine"))
    assert desk.must_plan().new[0].start == 0


def test_without_the_cache_nothing_is_found() -> None:
    desk = make_desk(shares_prefixes=False)
    desk.claim()
    run_one(desk)
    desk.submit(submission("second", prompt=PROMPT))
    assert desk.must_plan().new[0].start == 0


def test_a_row_that_failed_or_was_skipped_names_no_block() -> None:
    desk = make_desk()
    desk.claim()
    run_one(desk, finish="error")
    desk.submit(submission("second", prompt=PROMPT))
    assert desk.must_plan().new[0].start == 0

    desk = make_desk(depth=2)
    desk.claim()
    desk.submit(submission("first", prompt=7, max_tokens=9))
    desk.now_s += 1
    plans = [desk.must_plan()]
    desk.now_s += 1
    plans.append(desk.must_plan())  # feeds the token that the first one draws: it would fill two blocks
    answer(desk, plans[0], 50, finish="stop")
    answer(desk, plans[1], 0, skipped=True)
    ids = (*range(7), 50, 60)
    desk.submit(type(submission())(RequestId("second"), 1, submission().gateway, ids, 4))
    assert desk.must_plan().new[0].start == 4


def test_a_new_leader_finds_what_the_worker_says_it_has() -> None:
    chain = HashChain(KEY, SIZE.block_tokens)
    chain.extend(range(8))
    named = tuple(NamedBlock(BlockId(5 - i), content) for i, content in enumerate(chain.hashes))
    desk = make_desk()
    desk.claim(named=(*named, NamedBlock(BlockId(99), chain.hashes[0])))
    desk.submit(submission("second", prompt=PROMPT))
    new = desk.must_plan().new[0]
    assert (new.start, new.blocks[:2]) == (8, (BlockId(5), BlockId(4)))


def test_the_report_tells_what_was_found_and_what_memory_is_used_for() -> None:
    desk = make_desk()
    desk.claim()
    run_one(desk)
    desk.submit(submission("second", prompt=PROMPT, max_tokens=2))
    desk.must_plan()
    report = desk.held().report
    assert (report.prefix_queries, report.prefix_hits) == (2 * PROMPT, 8)
    assert (report.blocks_used, report.blocks_cached) == (3, 0)
    assert (report.kv_tokens_filled, report.kv_tokens_reserved, report.kv_tokens_internal) == (9, 2, 1)
