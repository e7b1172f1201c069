"""What held memory is used for, by hand-computed numbers."""

from shared.scheduling.waste import KvUse, kv_use
from tests.harness import Bench


def test_on_demand_only_the_rest_of_the_last_block_is_reserved_or_internal() -> None:
    """Blocks of 4, two for each. A: 6 of 6 + 9, so two are for its answer. B: 5 of 5 + 2: two of three."""
    bench = Bench("sarathi", block=4)
    bench.arrive("A", 6, 9)
    bench.arrive("B", 5, 2)
    bench.iterate()
    assert kv_use(bench.worker) == KvUse(filled=11, reserved=2 + 2, internal=1)


def test_what_is_set_aside_at_admission_is_reserved_until_it_is_filled() -> None:
    """Blocks of 4, prompt 3 and max_tokens 6, twice: 9 positions in three blocks each."""
    bench = Bench("orca", block=4)
    bench.arrive("A", 3, 6)
    bench.arrive("B", 3, 6)
    bench.iterate()
    assert kv_use(bench.worker) == KvUse(filled=6, reserved=12, internal=6)
    bench.iterate_times(2)
    assert kv_use(bench.worker) == KvUse(filled=10, reserved=8, internal=6)


def test_a_block_that_three_share_counts_once() -> None:
    """Blocks of 4: each of three holds 8 + 1 tokens in three blocks, of which two are shared."""
    bench = Bench("sarathi", block=4)
    for name in "abc":
        bench.arrive(name, [*range(8), ord(name)], 4)
        bench.iterate()
    bench.plan()
    computed = [bench.kv_of(name) for name in "abc"]
    assert computed == [12, 11, 10]
    # a needs no more than 12 positions, c two more than it has: 8 + (4 + 3 + 2) are filled
    assert kv_use(bench.worker) == KvUse(filled=17, reserved=3, internal=0)
