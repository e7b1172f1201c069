"""Attention over block tables, on every path there is, against straightforward float64."""

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.attention_kernel import load_kernel
from services.worker.attention_path import Asked, AttentionPath, New
from services.worker.attention_torch import TorchPath
from services.worker.progress import Progress
from tests.unit.attention_rig import Case, Shape, case_of, expected, only
from tests.unit.linear_rig import EMULATED_AMX

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]
VARIANTS = {
    "amx": (),
    "amx_emulated": EMULATED_AMX,
    "avx512_bf16": ("-DNO_AMX", "-DANYONES_DOTS"),
    "avx512_slow_dots": ("-DNO_AMX", "-DNO_DOTS"),
    "avx512": ("-DNO_AMX", "-mno-avx512bf16"),
    "avx2": ("-DNO_AMX", "-mno-avx512f"),
    "portable": ("-DNO_AMX", "-mno-avx512f", "-mno-avx2"),
}
"""What the compiler is told not to use: each variant of the source runs on any machine that has the wider ones."""
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@lru_cache(maxsize=8)
def _path(name: str, root: Path) -> AttentionPath:
    return TorchPath() if name == "torch" else load_kernel(Progress(), root=root, flags=VARIANTS[name]).path


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AttentionPath:
    return _path(request.param, tmp_path_factory.getbasetemp() / "kernels")


@pytest.fixture(scope="module", params=list(VARIANTS))
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AttentionPath:
    return _path(request.param, tmp_path_factory.getbasetemp() / "kernels")


LENGTHS = st.one_of(st.integers(1, 200), st.sampled_from([511, 512, 513, 1023, 1024, 1025, 2100]))
SHAPES = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 7, 32]),
    dim=st.sampled_from([8, 16, 24, 64, 72, 80, 96, 128, 256]),
    block_tokens=st.sampled_from([1, 7, 8, 16, 32, 48, 64]),
    dtype=st.sampled_from(list(NEAR)),
)
ASKED = st.builds(
    Asked,
    scale=st.sampled_from([0.05, 0.125, 0.3]),
    window=st.sampled_from([None, None, 1, 5, 64, 300, 4096]),
    softcap=st.sampled_from([None, None, 0.5, 2.0, 30.0]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Decodes and chunks, whose starts lie anywhere in a block, through tables in no order."""
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        end = draw(LENGTHS)
        fed = draw(st.one_of(st.just(1), st.integers(1, min(end, 80))))
        spans.append((end - fed, end))
    return case_of(draw(SHAPES), spans, draw(st.integers(0, 1000)))


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got.double() - wanted).abs().max() < NEAR[got.dtype]


@settings(max_examples=40)
@given(case=cases(), asked=ASKED)
def test_ragged_batches_come_out_as_in_float64(path: AttentionPath, case: Case, asked: Asked) -> None:
    got, written = case.attend(path, asked)
    assert got.is_contiguous()
    assert_near(got, expected(case, written, asked))


@settings(max_examples=25)
@given(case=cases())
def test_new_keys_and_values_go_to_their_slots_and_nothing_else_is_touched(kernel: AttentionPath, case: Case) -> None:
    _, written = case.attend(kernel, Asked(0.1))
    size = case.view.block_tokens
    for before, after, new in (
        (case.pool.keys, written.keys, case.new.keys),
        (case.pool.values, written.values, case.new.values),
    ):
        wanted = before.clone()
        for token, slot in enumerate(case.view.slots):
            wanted[slot // size, :, slot % size] = new[:, token]
        assert torch.equal(after.nan_to_num(nan=9.0), wanted.nan_to_num(nan=9.0))


@settings(max_examples=25)
@given(case=cases(), asked=ASKED, threads=st.sampled_from([1, 2]), data=st.data())
def test_a_row_comes_out_bit_for_bit_the_same_whoever_else_is_in_the_batch(
    kernel: AttentionPath, case: Case, asked: Asked, threads: int, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, len(case.view.firsts) - 1))
    alone, _ = only(case, row).attend(kernel, asked)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    together, _ = case.attend(kernel, asked)
    torch.set_num_threads(before)
    first = int(case.view.firsts[row])
    assert torch.equal(together[first : first + len(alone)], alone)


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_a_few_query_heads_see_every_position_and_none_beyond(path: AttentionPath, group: int, dim: int) -> None:
    ends = [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 66, 127, 200, 513]
    case = case_of(Shape(group=group, dim=dim, dtype=torch.bfloat16), [(end - 1, end) for end in ends], seed=5)
    for asked in (Asked(0.125), Asked(0.3, window=20)):
        got, written = case.attend(path, asked)
        assert_near(got, expected(case, written, asked))


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1])
def test_a_window_wider_than_any_row_hides_nothing(path: AttentionPath, window: int) -> None:
    case = case_of(Shape(), [(99, 100), (20, 60), (700, 703)], seed=6)
    got, written = case.attend(path, Asked(0.125, window=window))
    assert_near(got, expected(case, written, Asked(0.125)))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7F800001])
def test_a_row_that_is_not_a_number_stays_alone_with_it(path: AttentionPath, bits: int) -> None:
    case = case_of(Shape(), [(99, 100), (20, 60), (700, 701)], seed=1)
    queries = case.new.queries.clone()
    queries.view(torch.int32)[:, 5] = bits
    out, written = Case(case.view, case.pool, New(queries, case.new.keys, case.new.values)).attend(path, Asked(0.1))
    wanted = expected(case, written, Asked(0.1))
    assert torch.isnan(out[5]).all()
    rest = [token for token in range(len(out)) if token != 5]
    assert_near(out[rest], wanted[rest])


def test_scores_far_apart_neither_overflow_nor_vanish(path: AttentionPath) -> None:
    case = case_of(Shape(), [(999, 1000), (0, 90)], seed=2)
    for asked in (Asked(1000.0), Asked(1000.0, softcap=30.0), Asked(1e-6)):
        out, written = case.attend(path, asked)
        assert torch.isfinite(out).all()
        assert (out.double() - expected(case, written, asked)).abs().max() < 1e-2


def test_layers_may_hand_in_another_type_than_the_pool_has(path: AttentionPath) -> None:
    case = case_of(Shape(dtype=torch.bfloat16), [(40, 41), (3, 30)], seed=3)
    new = New(case.new.queries.float(), case.new.keys.float(), case.new.values.float())
    mixed = Case(case.view, case.pool, new)
    out, written = mixed.attend(path, Asked(0.1))
    assert out.dtype == torch.float32
    assert (out.double() - expected(mixed, written, Asked(0.1))).abs().max() < NEAR[torch.bfloat16]


@pytest.mark.parametrize("dim", [1, 3, 5])
def test_dims_of_no_round_size_are_served_in_float32(path: AttentionPath, dim: int) -> None:
    case = case_of(Shape(dim=dim), [(99, 100), (20, 60)], seed=4)
    out, written = case.attend(path, Asked(0.5))
    assert_near(out, expected(case, written, Asked(0.5)))
