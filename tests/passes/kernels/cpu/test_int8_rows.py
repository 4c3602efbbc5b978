"""The kernel in C++ for few rows and int8 weights: bounds against float64, values that are no numbers, and threads.

Its loops without AVX512-VNNI compute the same numbers, so every machine with a C++ compiler tests the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from piecegraph.passes.kernels.cpu import int8_rows
from piecegraph.passes.kernels.cpu.int8_rows import KERNEL, MAX_BFLOAT16_ROWS, MAX_SIZE
from piecegraph.passes.ops.quantised.int8_linear import int8_linear
from tests.cpp_kernels import library, needs_cpp_compiler, use_kernel

pytestmark = needs_cpp_compiler

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16)
STEPS = 32_639
"""The largest number of the fixed point."""


@pytest.fixture(params=["as it is", "plain"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("-DPIECEGRAPH_PLAIN",) if request.param == "plain" else ()
    use_kernel(KERNEL, monkeypatch, *more)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs(rows: int, columns: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * columns + size)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    weight = torch.randint(-128, 128, (columns, size), generator=generator, dtype=torch.int8)
    scale, bias = torch.rand(columns, generator=generator) / 64, torch.randn(columns, generator=generator)
    return x, weight, scale.to(dtype), bias.to(dtype)


def computed(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = int8_rows.int8_rows(x, weight, scale, bias)
    assert out is not None and out.dtype is x.dtype and out.is_contiguous()
    return out


def check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Each input is wrong by half a step of its row (and some of float32's roundings), and the result is rounded."""
    weights = weight.double() * scale.double()[:, None]
    wanted = x.double() @ weights.T + (0 if bias is None else bias.double())
    half_step = 0.52 * x.double().abs().amax(1, keepdim=True) / STEPS
    rounding = 2**-8 if x.dtype is torch.bfloat16 else 2**-23
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    bound = half_step * weights.abs().sum(1) + rounding * wanted.abs() + smallest
    assert ((computed(x, weight, scale, bias).double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 64, 65, 127, 128, 576, 4096])
def test_it_is_as_exact_as_its_fixed_point(size: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 3, 4, 16, 17, MAX_BFLOAT16_ROWS):
        for columns in (1, 3, 4, 5, 130):
            x, weight, scale, bias = inputs(rows, columns, size, dtype)
            check(x, weight, scale, None)
            check(x, weight, scale, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1e-44, 1e-39, 1e-38, 1e-30, 1e-19, 1e19, 1e36])
def test_the_size_of_numbers_does_not_matter(factor: float, dtype: torch.dtype) -> None:
    x, weight, scale, _ = inputs(3, 7, 65, torch.float32)
    x = (x.double() * factor).to(dtype)
    check(x, weight, (scale / 100).to(dtype), None)


def test_rows_do_not_share_a_scale() -> None:
    x, weight, scale, bias = inputs(5, 7, 576, torch.float32)
    x = x * torch.tensor([1e-40, 1.0, 1e30, 0.0, 1e-5])[:, None]
    check(x, weight, scale, bias)
    alone = [computed(row[None], weight, scale, bias) for row in x]
    assert torch.equal(torch.cat(alone), computed(x, weight, scale, bias))


def test_any_number_of_float32_rows_has_the_bits_of_each_alone() -> None:
    """They are multiplied 128 at a time; no request's numbers depend on how many there are."""
    x, weight, scale, bias = inputs(300, 9, 80, torch.float32)
    check(x, weight, scale, bias)
    together = computed(x, weight, scale, bias)
    for first, last in ((0, 1), (127, 129), (128, 256), (299, 300)):
        assert torch.equal(computed(x[first:last], weight, scale, bias), together[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_sums_fit(dtype: torch.dtype) -> None:
    for weights in (-128, 127):
        for inputs in (1.0, -1.0):
            x = torch.full((2, MAX_SIZE), inputs, dtype=dtype)
            weight = torch.full((5, MAX_SIZE), weights, dtype=torch.int8)
            wanted = float(torch.tensor(float(weights) * inputs * MAX_SIZE).to(dtype))
            assert (computed(x, weight, torch.ones(5, dtype=dtype), None) == wanted).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_row_with_a_value_that_is_no_number_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    """Also where the weights are zero, and no other row changes."""
    x, weight, scale, bias = inputs(4, 9, 70, dtype)
    weight[0] = 0
    clean = computed(x, weight, scale, bias)
    for place in (0, 63, 69):
        spoilt = x.clone()
        spoilt[1, place] = bad
        out = computed(spoilt, weight, scale, bias)
        assert out[1].isnan().all() and torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_give_the_bias(dtype: torch.dtype) -> None:
    _, weight, scale, bias = inputs(2, 9, 70, dtype)
    x = torch.zeros(2, 70, dtype=dtype)
    x[1] = -0.0
    assert torch.equal(computed(x, weight, scale, bias), bias.expand(2, 9))
    assert (computed(x, weight, scale, None) == 0).all()


def test_scales_may_be_zero_negative_or_not_finite() -> None:
    x, weight, _, _ = inputs(1, 4, 64, torch.float32)
    out = computed(x, weight, torch.tensor([0.0, -1.0, INF, NAN]), None)[0]
    plain = computed(x, weight, torch.ones(4), None)[0]
    assert out[0] == 0 and out[1] == -plain[1] and out[2].isinf() and out[3].isnan()


def test_what_is_too_large_for_the_dtype_is_infinite() -> None:
    x, weight = torch.full((1, 64), 3e38), torch.full((1, 64), 127, dtype=torch.int8)
    assert computed(x, weight, torch.ones(1), None) == INF
    assert computed(-x, weight, torch.ones(1), None) == -INF


def test_threads_and_calls_at_once_change_nothing(threads: None) -> None:
    from concurrent.futures import ThreadPoolExecutor

    cases = [inputs(rows, 1000, 576, torch.float32) for rows in (1, 2, 9)]
    torch.set_num_threads(1)
    wanted = [computed(*case) for case in cases]
    torch.set_num_threads(2)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            assert all(map(torch.equal, wanted, pool.map(lambda case: computed(*case), cases)))


def test_memory_of_x_may_lie_anyhow() -> None:
    x, weight, scale, bias = inputs(6, 9, 70, torch.float32)
    wanted = computed(x, weight, scale, bias)
    wide = torch.empty(6, 141)[:, 1:141:2]
    wide.copy_(x)
    for other in (wide, x.T.contiguous().T, x.as_strided(x.shape, x.stride())):
        assert torch.equal(computed(other, weight, scale, bias), wanted)
    assert torch.equal(computed(x.view(1, 2, 3, 70), weight, scale, bias), wanted.view(1, 2, 3, 9))
    shifted = torch.empty(6 * 70 + 1)[1:].view(6, 70)  # no 8 bytes are aligned
    shifted.copy_(x)
    assert torch.equal(computed(shifted, weight, scale, bias), wanted)


def test_what_it_does_not_compute_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, scale, bias = inputs(MAX_BFLOAT16_ROWS + 1, 4, 64, torch.float32)
    assert int8_rows.int8_rows(x.bfloat16(), weight, scale.bfloat16(), None) is None
    assert int8_rows.int8_rows(x[:0], weight, scale, bias) is None
    assert int8_rows.int8_rows(x[:1].double(), weight, scale.double(), None) is None
    wide = torch.zeros(1, MAX_SIZE + 1)
    assert int8_rows.int8_rows(wide, torch.zeros(4, MAX_SIZE + 1, dtype=torch.int8), scale, None) is None
    assert bias is not None
    one = x[:1]
    for others in (
        (torch.zeros(1, 1024), weight, scale, None),
        (one, torch.zeros(64, 4, dtype=torch.int8).t(), scale, None),
        (one, weight, scale[:1].expand(4), None),
        (one, weight, scale[:3], None),
        (one, weight, scale, bias[:1].expand(4)),
        (one, weight, scale, bias[:3]),
        (one, weight, scale, bias.bfloat16()),
    ):
        assert int8_rows.int8_rows(*others) is None
    with pytest.raises(RuntimeError, match=r"shape|size"):
        int8_linear(torch.zeros(1, 1024), weight, scale, None)
    monkeypatch.setattr(KERNEL, "call", None)
    assert int8_rows.int8_rows(x[:1], weight, scale, bias) is None


def test_both_ways_to_compute_agree_bit_by_bit() -> None:
    plain = KERNEL.function_of(library(KERNEL, "-DPIECEGRAPH_PLAIN"))
    for dtype in DTYPES:
        for size in (1, 63, 64, 577):
            x, weight, scale, bias = inputs(3, 7, size, dtype)
            out = torch.empty(3, 7, dtype=dtype)
            pointers = (weight.data_ptr(), scale.data_ptr(), bias.data_ptr(), out.data_ptr())
            assert plain(x.data_ptr(), size, *pointers, 3, 7, size, dtype is torch.bfloat16, 1) == 0
            assert torch.equal(computed(x, weight, scale, bias), out)


def test_a_library_without_the_instructions_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNEL, "why_not", "")
    KERNEL.use(library(KERNEL, "-DPIECEGRAPH_PLAIN"))
    assert KERNEL.why_not.startswith("the C++ compiler has no avx512_vnni") and KERNEL.call is None
