"""Packed linear layers, in every variant of the kernel, against straightforward float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from services.worker.linear_memory import WeightMemory
from services.worker.program_weights import Packed
from tests.unit.linear_rig import (
    ACTIVATED,
    ADD,
    GATED,
    GELU,
    GELU_TANH,
    NONE,
    RELU,
    SILU,
    VARIANTS,
    Kind,
    LinearKernel,
    call_of,
    interleaved,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]
ROWS = (*range(1, 71), 200)
UNTOUCHED = 7.0
ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: functional.silu,
    GELU_TANH: partial(functional.gelu, approximate="tanh"),
    GELU: functional.gelu,
    RELU: functional.relu,
}


@lru_cache(maxsize=8)
def _kernel(variant: str, root: Path) -> LinearKernel:
    return LinearKernel(variant, root)


@pytest.fixture(scope="module", params=list(VARIANTS))
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LinearKernel:
    if request.param == "amx" and "amx_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AMX: the variant would be another's")
    return _kernel(request.param, tmp_path_factory.getbasetemp() / "kernels")


def inputs_of(rows: int, width: int, *, beside: int = 0) -> torch.Tensor:
    """Return rows of inputs, with rows of NaN behind them as far as the kernel may read, and columns beside them."""
    x = torch.full((-(-rows // 16) * 16, width + beside), math.nan, dtype=torch.bfloat16)
    x[:rows, :width] = torch.randn(rows, width)
    return x[:, :width]


def outputs_of(rows: int, width: int, dtype: torch.dtype, *, beside: int = 3) -> torch.Tensor:
    """Return room for outputs in the midst of what must not be touched."""
    return torch.full((rows + 1, width + beside), UNTOUCHED, dtype=dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def check(got: torch.Tensor, wanted: torch.Tensor, *, relative: float) -> None:
    """Close as sums of products are: by the size of what is summed, not of what is left of it."""
    assert not got.isnan().any()
    torch.testing.assert_close(got.double(), wanted, rtol=relative, atol=relative * float(wanted.abs().max()))


NEAR = {torch.float32: 2e-5, torch.bfloat16: 4.5e-3}


@dataclass(frozen=True)
class Asked:
    """What is to be done with the product."""

    epilogue: int = NONE
    activation: int = SILU
    dtype: torch.dtype = torch.float32
    add: torch.Tensor | None = None


PLAIN = Asked()


def run(kernel: LinearKernel, packed: Packed, x: torch.Tensor, rows: int, asked: Asked = PLAIN) -> torch.Tensor:
    """Return what comes out, having seen that nothing else was written."""
    width = packed.linear.outputs // (2 if asked.epilogue == GATED else 1)
    room = outputs_of(rows, width, asked.dtype)
    kernel.run([call_of(packed, x, room[:rows, :width], (asked.epilogue, asked.activation), asked.add)])
    assert bool((room[rows:] == UNTOUCHED).all())
    assert bool((room[:, width:] == UNTOUCHED).all())
    return room[:rows, :width]


@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows_next_to_rows_of_anything(kernel: LinearKernel, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(96, 160).bfloat16(), inputs_of(rows, 160, beside=32)
    got = run(kernel, kernel.pack(weight), x, rows)
    check(got, product(x[:rows], weight, None), relative=NEAR[torch.float32])


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("outputs", [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 77, 1030])
def test_any_number_of_outputs(kernel: LinearKernel, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(outputs)
    weight, bias = torch.randn(outputs, 64).bfloat16(), torch.randn(outputs)
    add = torch.randn(37, outputs + 1).bfloat16()[:, :outputs]
    x = inputs_of(37, 64)
    packed = kernel.pack(weight, bias)
    wanted = product(x[:37], weight, bias)
    check(run(kernel, packed, x, 37, Asked(dtype=dtype)), wanted, relative=NEAR[dtype])
    got = run(kernel, packed, x, 37, Asked(ADD, dtype=dtype, add=add))
    check(got, wanted + add, relative=NEAR[dtype])


@pytest.mark.parametrize("width", [32, 64, 96, 576, 1536, 2048, 2080, 4192])
@pytest.mark.parametrize("rows", [3, 40, 600])
def test_any_number_of_inputs(kernel: LinearKernel, width: int, rows: int) -> None:
    torch.manual_seed(width)
    weight, x = torch.randn(40, width).bfloat16(), inputs_of(rows, width)
    got = run(kernel, kernel.pack(weight), x, rows)
    check(got, product(x[:rows], weight, None), relative=NEAR[torch.float32])


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("has_bias", [True, False])
def test_activations_and_gates(kernel: LinearKernel, activation: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(activation)
    rows, x = 19, inputs_of(19, 96)
    gate, up = (torch.randn(80, 96).bfloat16() / 3 for _ in range(2))
    biases = [torch.randn(80) for _ in range(2)] if has_bias else [None, None]
    gates, ups = (product(x[:rows], weight, bias) for weight, bias in zip((gate, up), biases, strict=True))
    act = ACTIVATIONS[activation]
    alone = kernel.pack(gate, biases[0])
    check(run(kernel, alone, x, rows, Asked(ACTIVATED, activation, dtype)), act(gates), relative=NEAR[dtype])
    bias = interleaved(biases[0], biases[1]) if biases[0] is not None and biases[1] is not None else None
    both = kernel.pack(interleaved(gate, up), bias)
    check(run(kernel, both, x, rows, Asked(GATED, activation, dtype)), act(gates) * ups, relative=NEAR[dtype])


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations_of_small_and_large_numbers(kernel: LinearKernel, activation: int) -> None:
    numbers = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-3e38, -1e30, -200, -1e-6, 0, 1e-6, 200, 1e30])])
    x = torch.zeros(-(-len(numbers) // 16) * 16, 32, dtype=torch.bfloat16)
    x[: len(numbers), 0] = numbers
    weight = torch.zeros(1, 32).bfloat16()
    weight[0, 0] = 1
    got = run(kernel, kernel.pack(weight), x, len(numbers), Asked(ACTIVATED, activation))
    wanted = ACTIVATIONS[activation](x[: len(numbers), :1].double())
    torch.testing.assert_close(got.double(), wanted, rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_comes_out_in_its_own_row_alone(kernel: LinearKernel, spoilt: float, kind: Kind) -> None:
    if math.isinf(spoilt) and not (kind == Kind.INT8 and kernel.multiplies_bytes):
        pytest.skip("a sum that is infinite may be a number after its activation")
    weight, x = torch.randn(64, 64).bfloat16(), inputs_of(20, 64)
    x[7, 5] = spoilt
    for how in (NONE, GATED, ACTIVATED):
        for activation in ACTIVATIONS:
            is_none = run(kernel, kernel.pack(weight, kind=kind), x, 20, Asked(how, activation)).isnan()
            assert is_none[7].all()
            assert not is_none[:7].any()
            assert not is_none[8:].any()


@pytest.mark.parametrize("kind", list(Kind))
def test_what_is_added_may_be_where_the_sum_goes(kernel: LinearKernel, kind: Kind) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(576, 64).bfloat16(), inputs_of(18, 64)
    packed = kernel.pack(weight, kind=kind)
    y = torch.randn(18, 576).bfloat16()
    apart = run(kernel, packed, x, 18, Asked(ADD, dtype=torch.bfloat16, add=y.clone()))
    kernel.run([call_of(packed, x, y, (ADD, SILU), y)])
    assert torch.equal(y, apart)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("width", [64, 576, 2080])
def test_a_row_is_the_same_alone_and_among_others(kernel: LinearKernel, width: int, kind: Kind) -> None:
    torch.manual_seed(2)
    packed = kernel.pack(torch.randn(70, width).bfloat16(), kind=kind)
    x = inputs_of(600, width)
    together = run(kernel, packed, x, 600)
    for first, rows in ((0, 1), (63, 1), (5, 2), (16, 16), (10, 17), (0, 33), (30, 64), (599, 1), (500, 100)):
        few = inputs_of(rows, width)
        few[:rows] = x[first : first + rows]
        assert torch.equal(run(kernel, packed, few, rows), together[first : first + rows])


@pytest.mark.parametrize("kind", list(Kind))
def test_threads_share_the_work(kernel: LinearKernel, kind: Kind) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(20_000, 64).bfloat16(), inputs_of(3, 64)
    packed = kernel.pack(weight, kind=kind)
    alone = run(kernel, packed, x, 3)
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(kernel, packed, x, 3), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("width", [32, 64, 96, 576, 2080])
def test_int8_is_as_near_as_one_part_in_127_of_the_largest_of_a_group(kernel: LinearKernel, width: int) -> None:
    torch.manual_seed(4)
    weight = torch.randn(50, width).bfloat16()
    weight[:, -1] *= 100  # coarse in the last group, and in no other
    weight[3] = 0
    identity = torch.eye(-(-width // 16) * 16)[:, :width].bfloat16()
    got = run(kernel, kernel.pack(weight, kind=Kind.INT8), identity, width).T
    for begin in range(0, width, 32):
        group = weight[:, begin : begin + 32].double()
        most = group.abs().amax(1, keepdim=True)
        assert ((got[:, begin : begin + 32].double() - group).abs() <= most * (0.5 / 127 + 2**-8)).all()


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_int8_shows_a_weight_that_is_no_number_in_its_own_output(kernel: LinearKernel, spoilt: float) -> None:
    weight = torch.ones(40, 96).bfloat16()
    weight[33, 50] = spoilt
    weight[34] = 1e-38  # next to nothing
    got = run(kernel, kernel.pack(weight, kind=Kind.INT8), torch.ones(16, 96).bfloat16(), 5)
    assert got[:, 33].isnan().all()
    assert (got[:, 34] == 0).all()
    assert (got[:, :33] == 96).all()
    assert (got[:, 35:] == 96).all()


def test_int8_gives_back_what_was_int8(kernel: LinearKernel) -> None:
    torch.manual_seed(5)
    numbers = torch.randint(-127, 128, (64, 3, 32)).float()
    numbers[..., 0] = 127
    weight = (numbers * 2.0 ** -torch.arange(3)[:, None]).flatten(1).bfloat16()
    packed = kernel.pack(weight, kind=Kind.INT8)
    assert torch.equal(run(kernel, packed, torch.eye(96).bfloat16(), 96).T, weight.float())


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return each 32 numbers of a row as the nearest of 255 between minus and plus the largest of them."""
    groups = x.float().reshape(len(x), -1, 32)
    most = groups.abs().amax(2, keepdim=True)
    nearest = torch.round(groups * torch.tensor(127.0).div(most)).double() * most.double() / 127
    return nearest.nan_to_num(nan=0.0).reshape(x.shape)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 16, 33, 200])
def test_int8_sums_are_exact_sums_of_what_was_packed(kernel: LinearKernel, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(96, 544).bfloat16(), inputs_of(rows, 544)
    x[0, 64:96] = 0
    x[:rows, 96:128] *= 1e-3
    packed = kernel.pack(weight, kind=Kind.INT8)
    used = run(kernel, packed, torch.eye(544).bfloat16(), 544).T
    multiplied = in_bytes(x[:rows]) if kernel.multiplies_bytes else x[:rows]
    check(run(kernel, packed, x, rows), product(multiplied, used, None), relative=NEAR[torch.float32])
    check(used, weight.double(), relative=1e-2)


def test_nothing_is_done_for_no_rows(kernel: LinearKernel) -> None:
    x = inputs_of(16, 64)
    run(kernel, kernel.pack(torch.randn(64, 64)), x, 0)


def test_weights_lie_on_whole_cache_lines_side_by_side() -> None:
    memory = WeightMemory()
    pieces = [memory.take(size) for size in (1, 100, 64, 7)]
    assert [piece.data_ptr() - pieces[0].data_ptr() for piece in pieces] == [0, 64, 192, 256]
    assert [len(piece) for piece in pieces] == [1, 100, 64, 7]
    assert pieces[0].data_ptr() % 64 == 0
    assert len(memory.take(70_000_000)) == 70_000_000
