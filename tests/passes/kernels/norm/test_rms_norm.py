"""The norm's kernel gives what its reference gives: any rows, wherever they lie."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.common.gpu_limits import MAX_NORM_SIZE
from piecegraph.passes.kernels.norm.rms_norm import (
    Tile,
    add_rms_norm_of_parts_on_gpu,
    add_rms_norm_on_gpu,
    add_rms_norm_rounded_on_gpu,
    pick_tile,
    rms_norm_kernel,
    rms_norm_on_gpu,
    rms_norm_rounded_on_gpu,
)
from piecegraph.passes.kernels.quantised.rounded_rows import rounded_rows_on_gpu
from piecegraph.passes.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.graph_replays import assert_replays_equal
from tests.interpreter import interpreted

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2**-7}  # the short ones may round apart


def rows(*shape: int, dtype: torch.dtype, device: str, columns: slice = slice(None)) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=random) * 2).to(device, dtype)[..., columns]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.is_contiguous()
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def check_norm(x: torch.Tensor) -> None:
    weight = rows(x.shape[-1], dtype=torch.float32, device=x.device.type)
    for factor, offset in ((None, 0.0), (weight, 0.0), (weight.to(x.dtype), 1.0)):
        assert_close(rms_norm_on_gpu(x, factor, EPS, offset), rms_norm_reference(x, factor, EPS, offset))


def check_add(x: torch.Tensor, residual: torch.Tensor) -> None:
    weight = rows(x.shape[-1], dtype=x.dtype, device=x.device.type)
    found = add_rms_norm_on_gpu(x, residual, weight, EPS, 1.0)
    expected = add_rms_norm_reference(x, residual, weight, EPS, 1.0)
    assert torch.equal(found[1], expected[1])
    assert_close(found[0], expected[0])


def check_parts(residual: torch.Tensor, num_parts: int, *, has_bias: bool) -> None:
    """The sum is rounded once, with the residual in it."""
    size, device = residual.shape[-1], residual.device.type
    parts = rows(num_parts, residual.shape[0], size, dtype=torch.float32, device=device)
    bias, weight = (rows(size, dtype=residual.dtype, device=device) for _ in range(2))
    normed, total = add_rms_norm_of_parts_on_gpu(parts, bias if has_bias else None, residual, weight, EPS, 0.0)
    wide = parts.sum(0) + (bias.float() if has_bias else 0.0) + residual.float()
    assert_close(total, wide.to(residual.dtype))
    assert_close(normed, rms_norm_reference(total, weight, EPS, 0.0))


def check_rounded(x: torch.Tensor, residual: torch.Tensor, group: int, stored: torch.dtype) -> None:
    """Bit by bit what the separate kernels compute, or for float32 on a GPU as near to the norm as that.

    A thread of the separate kernel holds other columns of float32 there, so squares are added in another order.
    """

    def check(values: torch.Tensor, step: torch.Tensor, normed: torch.Tensor) -> None:
        normed, values, step = normed.flatten(0, -2), values.flatten(0, -2), step.flatten(0, -2)
        wanted, steps = rounded_rows_on_gpu(normed, group, stored)
        if x.is_cuda and x.dtype is torch.float32:
            tolerance = TOLERANCE[x.dtype]
            torch.testing.assert_close(step, steps, rtol=tolerance, atol=0.0)
            far, near = (
                (each.double() * of.double().repeat_interleave(group, -1)[:, : x.shape[-1]] - normed).abs()
                for each, of in ((values, step), (wanted, steps))
            )
            assert bool((far <= near + tolerance * normed.abs().amax(-1, keepdim=True)).all())
        else:
            assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(step, steps)

    weight = rows(x.shape[-1], dtype=x.dtype, device=x.device.type)
    values, step = rms_norm_rounded_on_gpu(x, weight, EPS, 1.0, group, stored)
    check(values, step, rms_norm_on_gpu(x, weight, EPS, 1.0))
    normed, total = add_rms_norm_on_gpu(x, residual, None, EPS, 0.0)
    values, step, found = add_rms_norm_rounded_on_gpu(x, residual, None, EPS, 0.0, group, stored)
    assert torch.equal(found, total)
    check(values, step, normed)


def check_all_rounded(dtype: torch.dtype, device: str = "cpu") -> None:
    """Whole tokens and groups, the last of which is smaller; rows that share a program; zeros; no rows."""
    for stored in (torch.int8, torch.float8_e4m3fn):
        for shape in ((2, 3, 320), (37, 80), (0, 128)):
            x, residual = (rows(*shape[:-1], shape[-1] + 16 * i, dtype=dtype, device=device) for i in range(2))
            x[:1], residual[:1] = 0, 0
            for group in (shape[-1], 64, 16):
                check_rounded(x, residual[..., 16:], group, stored)
    x = rows(3, 256, dtype=dtype, device=device)
    x[1, 200] = torch.nan
    _, step = rms_norm_rounded_on_gpu(x, None, EPS, 0.0, 128, torch.int8)
    assert step.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2], "no finite answer hides it"


def check_layouts(dtype: torch.dtype, device: str = "cpu") -> None:
    """Heads of a merged projection, in both orders; columns of it; short, odd and long rows; none."""
    projection = rows(1, 5, 512, dtype=dtype, device=device)
    heads = projection[..., 128:384].unflatten(-1, (4, 64))
    for x in (heads, heads.transpose(1, 2), projection[..., 64:144], projection[..., ::2]):
        check_norm(x)
    for shape in ((1, 64), (37, 80), (3, 1000), (2, 2048), (0, 128), (1, 0, 1000)):
        check_norm(rows(*shape, dtype=dtype, device=device))
    for shape in ((9, 96), (2, 1024), (0, 64)):
        x, residual = (rows(*shape[:-1], shape[-1] + 16 * i, dtype=dtype, device=device) for i in range(2))
        check_add(x, residual[..., 16:])
    check_add(heads, heads.transpose(1, 2).contiguous().transpose(1, 2))
    check_parts(rows(7, 160, dtype=dtype, device=device)[:, 64:], 2, has_bias=True)
    check_parts(rows(20, 1024, dtype=dtype, device=device), 4, has_bias=False)


def check_interpreted() -> None:
    """The interpreter gets bfloat16 wrong."""
    check_layouts(torch.float32)
    check_layouts(torch.float16)


def check_rounded_interpreted() -> None:
    check_all_rounded(torch.float32)
    check_all_rounded(torch.float16)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_interpreted)


@pytest.mark.slow
def test_the_rounded_norm_equals_the_separate_kernels() -> None:
    interpreted(check_rounded_interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_rounded_norm_equals_the_separate_kernels_on_the_gpu(dtype: torch.dtype) -> None:
    check_all_rounded(dtype, "cuda")
    x, residual = (rows(33, 4096 + i, dtype=dtype, device="cuda") for i in range(2))
    for group in (4096, 128):
        check_rounded(x, residual[:, 1:], group, torch.float8_e4m3fn)


@pytest.mark.parametrize(("stored", "group"), [(torch.int8, 4096), (torch.float8_e4m3fn, 128)], ids=str)
def test_the_rounded_norm_compiles_for_hopper(stored: torch.dtype, group: int) -> None:
    floats, tile = torch.empty(0, dtype=torch.bfloat16), pick_tile(4096)
    arguments = {
        "result": torch.empty(0, dtype=stored), "step": torch.empty(0), "total": floats, "x": floats, "bias": None,
        "residual": floats, "weight": floats, "num_rows": 3, "inner": 1, "outer_stride": 4096, "inner_stride": 0,
        "residual_stride": 4096, "eps": EPS, "offset": 0.0, "SIZE": 4096, "ROWS": tile.rows, "COLUMNS": tile.columns,
        "PARTS": 1, "GROUP": group, "MOST": 448.0, "OVERLAP": True,
    }  # fmt: skip
    ptx = compile_for_gpu(rms_norm_kernel, arguments, {"num_warps": tile.num_warps})
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (stored is torch.float8_e4m3fn), "it is rounded from float32"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernel_equals_the_reference_on_the_gpu(dtype: torch.dtype) -> None:
    check_layouts(dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1024, 2560, 3584, 4096, 5120, 8192, MAX_NORM_SIZE])
@pytest.mark.parametrize("num_rows", [1, 32, 256, 3000])
def test_hidden_sizes_of_real_models(num_rows: int, size: int) -> None:
    x, residual = (rows(num_rows, size + i, dtype=torch.bfloat16, device="cuda") for i in range(2))
    check_norm(x)
    check_add(x, residual[:, 1:])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_tokens", [1, 33, 2048])
def test_heads_of_a_projection_are_normed_on_the_gpu(num_tokens: int, head_dim: int) -> None:
    projection = rows(1, num_tokens, 48 * head_dim, dtype=torch.bfloat16, device="cuda")
    check_norm(projection[..., : 32 * head_dim].unflatten(-1, (32, head_dim)))
    check_norm(projection[..., 32 * head_dim : 40 * head_dim].unflatten(-1, (8, head_dim)))


@pytest.mark.gpu
def test_rows_beyond_two_gibielements() -> None:
    """Offsets exceed 32 bits in columns of a projection of many tokens."""
    wide = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device="cuda")[:, 128:256]
    wide[-3:] = rows(3, 128, dtype=torch.bfloat16, device="cuda")
    assert_close(rms_norm_on_gpu(wide, None, EPS, 0.0)[-3:], rms_norm_reference(wide[-3:], None, EPS, 0.0))


def test_short_rows_share_a_program_and_long_ones_fill_it() -> None:
    assert pick_tile(64) == Tile(rows=16, columns=64, num_warps=4)
    assert pick_tile(128) == Tile(rows=8, columns=128, num_warps=4)
    assert pick_tile(2048) == Tile(rows=1, columns=2048, num_warps=8)
    assert pick_tile(3000) == Tile(rows=1, columns=4096, num_warps=16)
    assert pick_tile(MAX_NORM_SIZE) == Tile(rows=1, columns=MAX_NORM_SIZE, num_warps=16)


def test_a_row_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="got rows of 16385; its kernel takes up to 16384: drop fuse-add-rms-norm"):
        rms_norm_on_gpu(torch.zeros(1, MAX_NORM_SIZE + 1), None, EPS, 0.0)


@pytest.mark.gpu
def test_a_weight_that_is_copied_in_a_graph_is_whole_when_it_is_read() -> None:
    """The kernel loads its weight before the preceding kernel has ended, which a copy of the weight must have."""
    torch.manual_seed(0)
    weights = torch.randn(12, 16384, device="cuda").bfloat16()[:, ::2]
    x, residual = torch.randn(2, 1, 8192, device="cuda").bfloat16()

    def chain() -> list[torch.Tensor]:
        y, total = x, residual
        for weight in weights:
            y, total = add_rms_norm_on_gpu(y, total, weight, EPS, 0.0)
        return [y, total]

    assert_replays_equal(chain)
