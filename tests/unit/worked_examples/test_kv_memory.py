"""Worked examples about KV memory, by number: what requests hold, what they share, and who gives way."""

from tests.harness import Bench


def test_t6_who_does_not_fit_is_not_admitted_though_somebody_finished() -> None:
    bench = Bench("sarathi", blocks=10, block=1)
    bench.arrive("A", 2, 1)
    bench.arrive("B", 4, 4)
    bench.iterate()
    bench.arrive("C", 7, 2)
    assert bench.iterate() == {"B": 1}


def test_t8_kv_after_the_step_is_7_and_6_of_24() -> None:
    bench = Bench("sarathi", seqs=8, budget=8, blocks=24, block=1)
    bench.arrive("B", 6, 9)
    bench.iterate()
    bench.arrive("C", 6, 9)
    bench.iterate()
    assert (bench.kv_of("B"), bench.kv_of("C"), bench.worker.pool.used) == (7, 6, 13)


def test_t9_the_token_sampled_last_has_no_kv_yet() -> None:
    bench = Bench("sarathi")
    request = bench.arrive("A", 5, 9)
    for generated in range(1, 6):
        bench.iterate()
        assert (request.output_tokens, request.computed) == (generated, 5 + generated - 1)


def test_t10_reservation_makes_c_wait_though_14_slots_are_unused() -> None:
    bench = Bench("orca", blocks=24, block=1, kv="reserve")
    bench.arrive("B", 6, 14)
    bench.iterate()
    bench.arrive("C", 6, 4)
    assert bench.iterate() == {"B": 1}
    assert (bench.kv_of("B"), bench.blocks_of("B"), bench.worker.pool.free) == (7, 20, 4)


def test_t11_on_demand_admits_c() -> None:
    bench = Bench("orca", blocks=24, block=1, kv="paged")
    bench.arrive("B", 6, 14)
    bench.iterate()
    bench.arrive("C", 6, 4)
    assert bench.iterate() == {"B": 1, "C": 6}
    assert bench.worker.pool.used == 13


def test_t12_nobody_overtakes_a_blocked_head() -> None:
    """Algorithm 1's ``break``. With transformers' ``continue`` D would fit at once, and C might wait for ever."""
    bench = Bench("orca", blocks=24, block=1, kv="reserve")
    bench.arrive("B", 6, 14)
    bench.arrive("C", 4, 6)
    bench.arrive("D", 2, 2)
    fed = bench.run_dry()
    assert all(step in ({"B": 6}, {"B": 1}) for step in fed[:14])
    assert fed[14] == {"C": 4, "D": 2}


def test_t13_paged_blocks_of_4_waste_3_slots_inside() -> None:
    bench = Bench("sarathi", blocks=6, block=4)
    bench.arrive("B", 6, 9)
    bench.iterate()
    bench.arrive("C", 6, 9)
    bench.iterate()
    assert (bench.blocks_of("B"), bench.blocks_of("C"), bench.worker.pool.free) == (2, 2, 2)
    assert 4 * 4 - bench.kv_of("B") - bench.kv_of("C") == 3


def test_t43_block_4_prompt_7_holds_2_2_3_blocks() -> None:
    bench = Bench("sarathi", blocks=8, block=4)
    bench.arrive("A", 7, 9)
    held = []
    for _ in range(3):
        bench.iterate()
        held.append(bench.blocks_of("A"))
    assert held == [2, 2, 3]


def test_t45_the_last_running_gives_way_nobody_is_admitted_and_it_resumes_by_recompute() -> None:
    """vLLM puts a victim at the front of its waiting queue, we at its old place in the one line. With one victim that
    is the same; with several, the front would turn their order round.
    """
    bench = Bench("sarathi", blocks=4, block=4)
    bench.arrive("A", 8, 6)
    bench.arrive("B", 7, 6)
    bench.iterate()
    bench.arrive("C", 1, 1)
    assert bench.iterate() == {"A": 1}
    assert bench.steps[-1].preempted == ("B",)
    assert [request.id for request in bench.planner.state.line] == ["B", "C"]
    fed = bench.run_dry()
    again = next(rows for rows in fed if "B" in rows)
    assert again["B"] == 7 + 1  # the prompt, and the token it had sampled
    assert sum("B" in rows for rows in fed) == 5


def test_t4_who_leaves_gives_back_what_it_had_alone_and_not_what_it_shared() -> None:
    bench = Bench("sarathi", blocks=10, block=4)
    common = range(8)
    other = bench.arrive("other", [*common, 8], 9)
    bench.iterate()
    bench.arrive("A", [*common, 9], 1)
    assert bench.iterate() == {"other": 1, "A": 1}  # two blocks were found: only A's ninth token is computed
    shared = bench.steps[-1].admitted[0].blocks[:2]
    assert list(shared) == other.blocks[:2]
    assert bench.worker.pool.used == 3  # A has left with its one block
    assert [bench.worker.pool.holders(block) for block in shared] == [1, 1]
    assert bench.iterate() == {"other": 1}


def test_t44_two_samples_share_the_full_block_of_their_prompt_and_write_into_blocks_of_their_own() -> None:
    """vLLM's figure 8 shares the last, partial block as well, and copies it when the first of the two writes. We share
    full blocks only, so nobody ever writes into what another reads: no copy, and the few tokens of the partial block
    are computed once more.
    """
    bench = Bench("sarathi", blocks=10, block=4)
    prompt = range(7)
    first = bench.arrive("id/0", prompt, 9)
    bench.iterate()
    second = bench.arrive("id/1", prompt, 9)
    assert bench.iterate() == {"id/0": 1, "id/1": 3}
    assert (first.blocks[0], first.blocks[1] == second.blocks[1]) == (second.blocks[0], False)
    assert bench.worker.pool.holders(first.blocks[0]) == 2
    bench.iterate_times(2)
    assert [bench.worker.pool.holders(block) for block in (*first.blocks[1:], *second.blocks[1:])] == [1, 1, 1, 1]
