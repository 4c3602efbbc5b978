"""A layer's linears by one call in C++ are those step by step, and near float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from piecegraph.passes.kernels.cpu import int8_layer, int8_rows
from piecegraph.passes.kernels.cpu.int8_layer import Norm
from piecegraph.passes.ops.rms_norm import add_rms_norm_reference
from tests.cpp_kernels import needs_cpp_compiler, use_kernel
from tests.passes.int8_layers import HIDDEN, inputs, layer, norm, reference

pytestmark = needs_cpp_compiler

DTYPES = (torch.float32, torch.bfloat16)
BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 3e-2}
"""The largest errors that rounding leaves (16 bits of fixed point, or bfloat16), as parts of the largest number."""


@pytest.fixture(params=["as it is", "plain"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("-DPIECEGRAPH_PLAIN",) if request.param == "plain" else ()
    for kernel in (int8_rows.KERNEL, int8_layer.KERNEL, int8_layer.ADD_AND_NORM, int8_layer.GATE_ROWS):
        use_kernel(kernel, monkeypatch, *more)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1,), (3,), (1, 5), (64,), (2, 150)])
@pytest.mark.parametrize(
    "how", [{}, {"weight": None}, {"offset": 1.0, "eps": 0.5}], ids=["plain", "no weight", "offset"]
)
def test_a_layer_is_near_float64(dtype: torch.dtype, rows: tuple[int, ...], how: dict[str, Any]) -> None:
    """More than 128 rows are computed in parts."""
    x, residual = inputs(*rows, dtype=dtype)
    of = layer(dtype, has_bias=len(rows) == 2, **how)
    found = int8_layer.int8_layer(x, residual, of)
    if dtype is torch.bfloat16 and residual.numel() // HIDDEN > int8_rows.MAX_BFLOAT16_ROWS:
        assert found is None
        return
    assert found is not None
    for own, wanted in zip(found, reference(x, residual, of), strict=True):
        assert own.dtype is dtype and own.is_contiguous() and own.shape == wanted.shape
        assert (own.double() - wanted).abs().max() <= BOUNDS[dtype] * wanted.abs().max()


def test_rows_do_not_depend_on_others_or_threads(threads: None) -> None:
    """Bit by bit."""
    x, residual = inputs(150, dtype=torch.float32)
    of = layer(torch.float32)
    alone = [int8_layer.int8_layer(x[row : row + 1], residual[row : row + 1], of) for row in (0, 127, 128, 149)]
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        together = int8_layer.int8_layer(x, residual, of)
        assert together is not None
        for row, one in zip((0, 127, 128, 149), alone, strict=True):
            assert one is not None
            assert all(torch.equal(many[row], single[0]) for many, single in zip(together, one, strict=True))


def test_what_has_gaps_is_read_as_it_is() -> None:
    x, residual = inputs(4, dtype=torch.float32)
    of = layer(torch.float32)
    apart = int8_layer.int8_layer(torch.stack([x, x], 1)[:, 0], residual.t().contiguous().t(), of)
    together = int8_layer.int8_layer(x, residual, of)
    assert apart is not None and together is not None and all(map(torch.equal, apart, together))


def test_infinities_and_nan_are_nan_in_their_row_alone() -> None:
    x, residual = inputs(4, dtype=torch.float32)
    x[1, 0], x[2, 3] = float("inf"), float("nan")
    found = int8_layer.int8_layer(x, residual, layer(torch.float32))
    assert found is not None
    for each in found:
        assert each[1:3].isnan().all() and each[0].isfinite().all() and each[3].isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, residual, of: (x.double(), residual, of),
        lambda x, residual, of: (x, residual.bfloat16(), of),
        lambda x, residual, of: (x, residual[:1], of),
        lambda x, residual, of: (x[:, :-1], residual, of),
        lambda x, residual, of: (x[:0], residual[:0], of),
        lambda x, residual, of: (x, residual, of._replace(norm=norm(HIDDEN, torch.bfloat16, 1))),
        lambda x, residual, of: (x, residual, of._replace(next_norm=norm(HIDDEN - 1, torch.float32, 1))),
        lambda x, residual, of: (x, residual, of._replace(down=of.down._replace(scale=of.down.scale.half()))),
        lambda x, residual, of: (x, residual, of._replace(gate_up=of.next)),
        lambda x, residual, of: (
            x,
            residual,
            of._replace(out=of.out._replace(weight=of.out.weight.t().contiguous().t())),
        ),
    ],
)
def test_what_the_kernel_does_not_read_is_left_to_others(change: Any) -> None:
    assert int8_layer.int8_layer(*change(*inputs(4, dtype=torch.float32), layer(torch.float32))) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [True, False])
def test_sums_and_norms_alone(dtype: torch.dtype, weight: bool) -> None:
    _, x = inputs(3, 70, dtype=dtype)
    by = norm(HIDDEN, dtype, 9, **({} if weight else {"weight": None}))
    found = int8_layer.add_and_norm(x, x.flip(0), by)
    assert found is not None
    normed, total = add_rms_norm_reference(x, x.flip(0), *by)
    assert torch.equal(found[1], total)
    torch.testing.assert_close(found[0], normed, rtol=2**-7 if dtype is torch.bfloat16 else 2e-6, atol=1e-6)
    assert int8_layer.add_and_norm(x, x, Norm(torch.ones(HIDDEN + 1, dtype=dtype), 1e-5, 0.0)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_alone(dtype: torch.dtype) -> None:
    """Over all of what an exponential may be of, to where it is no number of float32, and beyond."""
    gates = torch.cat([torch.linspace(-120, 120, 4801), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e4, -3e4, -3e38])])
    gates = gates.to(dtype)
    gate_up = torch.cat([gates, torch.full_like(gates, 1.5)]).view(1, -1)
    found = int8_layer.gate_rows(gate_up)
    assert found is not None and found.shape == (1, len(gates))
    wanted = torch.nn.functional.silu(gates.double()) * 1.5
    torch.testing.assert_close(found[0].double(), wanted, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=1e-36)
    lost = torch.tensor([[float("-inf"), float("nan"), float("inf"), 1.0, 1.0, 2.0]]).to(dtype)
    found = int8_layer.gate_rows(lost)
    assert found is not None and found.isnan().tolist() == [[True, True, False]] and found[0, 2] == float("inf")


def test_columns_that_are_no_halves_are_left_to_others() -> None:
    """Rather than written behind the result."""
    for shape in ((4, 5), (3, 1), (1000, 3)):
        assert int8_layer.gate_rows(torch.randn(shape)) is None
