"""Linears of two to 32 rows on tensor cores, weights from memory straight to the registers that multiply them.

A tensor core's product of 16 rows and 8 columns is over 16 numbers of each, of which a thread of a warp holds pairs two
here and two there. Which numbers those are does not matter to a sum, as long as both sides agree: so each thread loads
eight in a row of a weight and of `x`, sixteen bytes, and calls them its pairs of two products. Nothing goes through
shared memory, no warp waits for another until the sums are added at the end, and a warp has a tile ahead on its way.

Source: the layout of `mma.m16n8k16` operands in PTX ISA, "Warp-level matrix instructions".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.gated import gated
from piecegraph.passes.kernels.linear_config import RegisterConfig
from piecegraph.passes.kernels.overlapped import OverlappedKernel
from piecegraph.passes.kernels.own_kernel import own_kernel


def register_linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size], contiguous
    weight: torch.Tensor,  # [num_columns, size] or, gated, [2 * num_columns, size], contiguous
    bias: torch.Tensor | None,  # as many as the weight has rows
    activation: str,  # "": none
    config: RegisterConfig,  # for at least num_rows rows
) -> torch.Tensor:
    """`x @ weight.T + bias`, or with an activation `act(gate) * up` of its two halves; `[num_rows, num_columns]`."""
    num_rows, size = x.shape
    num_columns = weight.shape[0] // (2 if activation else 1)
    out = x.new_empty((num_rows, num_columns))
    _register.launch(
        (triton.cdiv(num_columns, config.columns_of(bool(activation))), 1, 1),
        (x, weight, bias, out, num_columns, size, num_rows),
        {
            "ROW_GROUPS": config.row_groups,
            "SLICES": config.num_slices,
            "WARPS": config.num_warps,
            "ACTIVATION": activation,
            "IS_HALF": x.dtype is torch.float16,
            "EMULATED": not x.is_cuda,
        },
        num_warps=config.num_warps,
        num_stages=1,
    )
    return out


@own_kernel
@triton.jit(do_not_specialize=["num_rows"])
def register_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_rows, size]
    weight,  # [num_columns, size], or twice as many rows: the gate's, then the other half's
    bias,  # as many as weight has rows, or None
    out,  # [num_rows, num_columns], written
    num_columns,
    size,  # a multiple of SLICES * 128
    num_rows,  # at most 8 * ROW_GROUPS
    ROW_GROUPS: tl.constexpr,  # 1: a warp has 32 rows of the weight; 2 or 4: it has 16
    SLICES: tl.constexpr,  # warps among which a row's numbers are divided
    WARPS: tl.constexpr,  # a multiple of SLICES: the others have other rows of the weight
    ACTIVATION: tl.constexpr,
    IS_HALF: tl.constexpr,  # float16, else bfloat16
    EMULATED: tl.constexpr,  # without tensor cores: for Triton's interpreter
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks,). Sums in float32."""
    GATED: tl.constexpr = ACTIVATION != ""
    COLUMNS: tl.constexpr = (32 if ROW_GROUPS == 1 else 16) // (2 if GATED else 1)  # of a warp
    CHUNK: tl.constexpr = SLICES * 128  # four tiles of each warp, side by side
    line = tl.arange(0, WARPS * 8)[:, None]  # eight of a warp
    warp, group = line // 8, line % 8
    at = warp % SLICES * 128 + tl.arange(0, 32)[None, :]
    column = (tl.program_id(0) * (WARPS // SLICES) + warp // SLICES) * COLUMNS + group

    # eight rows of the weight each: the first 16 are one operand, or one with the gate's and one with the other half's
    to_second = num_columns.to(tl.int64) * size if GATED else tl.cast(8, tl.int64) * size
    last = num_columns - 1
    first = weight + tl.minimum(column, last).to(tl.int64) * size + at
    if GATED:
        second = first + to_second
        third = weight + tl.minimum(column + 8, last).to(tl.int64) * size + at
        fourth = third + to_second
    else:
        second = weight + tl.minimum(column + 8, last).to(tl.int64) * size + at
        third = weight + tl.minimum(column + 16, last).to(tl.int64) * size + at
        fourth = weight + tl.minimum(column + 24, last).to(tl.int64) * size + at
    values = x + group.to(tl.int64) * size + at
    eight_rows = tl.cast(8, tl.int64) * size

    if OVERLAP:
        gdc_launch_dependents()
    a0, a1, a2, a3 = _four(first)
    b0, b1, b2, b3 = _four(second)
    if ROW_GROUPS == 1:
        c0, c1, c2, c3 = _four(third)
        d0, d1, d2, d3 = _four(fourth)
    if OVERLAP:
        gdc_wait()
    sums = tl.zeros([WARPS * 8, 32], tl.float32)
    more_sums = tl.zeros([WARPS * 8, 32], tl.float32)
    for start in range(0, size, CHUNK):
        v0, v1, v2, v3 = _four_of(values + start, group < num_rows)
        if ROW_GROUPS > 1:
            m0, m1, m2, m3 = _four_of(values + eight_rows + start, group + 8 < num_rows)
        if ROW_GROUPS > 2:
            n0, n1, n2, n3 = _four_of(values + 2 * eight_rows + start, group + 16 < num_rows)
            o0, o1, o2, o3 = _four_of(values + 3 * eight_rows + start, group + 24 < num_rows)
        at_a0, at_a1, at_a2, at_a3, at_b0, at_b1, at_b2, at_b3 = a0, a1, a2, a3, b0, b1, b2, b3
        if ROW_GROUPS == 1:
            at_c0, at_c1, at_c2, at_c3, at_d0, at_d1, at_d2, at_d3 = c0, c1, c2, c3, d0, d1, d2, d3
        ahead = start + CHUNK
        if ahead < size:
            a0, a1, a2, a3 = _four(first + ahead)
            b0, b1, b2, b3 = _four(second + ahead)
            if ROW_GROUPS == 1:
                c0, c1, c2, c3 = _four(third + ahead)
                d0, d1, d2, d3 = _four(fourth + ahead)
        if ROW_GROUPS == 1:
            sums = _one_group(at_a0, at_b0, at_c0, at_d0, v0, sums, IS_HALF, EMULATED)
            sums = _one_group(at_a1, at_b1, at_c1, at_d1, v1, sums, IS_HALF, EMULATED)
            sums = _one_group(at_a2, at_b2, at_c2, at_d2, v2, sums, IS_HALF, EMULATED)
            sums = _one_group(at_a3, at_b3, at_c3, at_d3, v3, sums, IS_HALF, EMULATED)
        else:
            sums = _two_groups(at_a0, at_b0, v0, m0, sums, IS_HALF, EMULATED)
            sums = _two_groups(at_a1, at_b1, v1, m1, sums, IS_HALF, EMULATED)
            sums = _two_groups(at_a2, at_b2, v2, m2, sums, IS_HALF, EMULATED)
            sums = _two_groups(at_a3, at_b3, v3, m3, sums, IS_HALF, EMULATED)
        if ROW_GROUPS > 2:
            more_sums = _two_groups(at_a0, at_b0, n0, o0, more_sums, IS_HALF, EMULATED)
            more_sums = _two_groups(at_a1, at_b1, n1, o1, more_sums, IS_HALF, EMULATED)
            more_sums = _two_groups(at_a2, at_b2, n2, o2, more_sums, IS_HALF, EMULATED)
            more_sums = _two_groups(at_a3, at_b3, n3, o3, more_sums, IS_HALF, EMULATED)
    _write(out, bias, sums, 0, num_rows, num_columns, ROW_GROUPS == 1, SLICES, WARPS, COLUMNS, ACTIVATION)
    if ROW_GROUPS > 2:
        _write(out, bias, more_sums, 16, num_rows, num_columns, False, SLICES, WARPS, COLUMNS, ACTIVATION)


@own_kernel
@triton.jit
def _write(  # type: ignore[no-untyped-def]  # compiled by Triton
    out,
    bias,
    sums,  # of each warp [8, 32]: eight rows of the weight; four times two rows of x, two products, two of its 16 rows
    first_row,
    num_rows,
    num_columns,
    ONE_GROUP: tl.constexpr,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    SUMS: tl.constexpr = WARPS // SLICES * 128
    total = tl.sum(tl.reshape(sums, [WARPS // SLICES, SLICES, 8, 32]), 1)
    total = tl.reshape(total, [WARPS // SLICES, 8, 4, 2, 2, 2])
    one, other = tl.split(tl.permute(total, [0, 1, 2, 3, 5, 4]))  # the last says which of the 16 rows
    one, other = tl.reshape(one, [SUMS]), tl.reshape(other, [SUMS])
    index = tl.arange(0, SUMS)
    product = index // 2 % 2
    row = first_row + index // 4 % 4 * 2 + index % 2 + (0 if ONE_GROUP else product * 8)
    column = (tl.program_id(0) * (WARPS // SLICES) + index // 128) * COLUMNS + index // 16 % 8
    if ONE_GROUP:
        column += product * (8 if GATED else 16)
    other_column = column + (num_columns if GATED else 8)
    is_there = column < num_columns
    is_other_there = is_there if GATED else other_column < num_columns
    if bias is not None:
        one += tl.load(bias + column, mask=is_there, other=0.0).to(tl.float32)
        other += tl.load(bias + other_column, mask=is_other_there, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64) * num_columns
    if GATED:
        one = gated(one, other, ACTIVATION)
    tl.store(to + column, one.to(out.dtype.element_ty), mask=(row < num_rows) & is_there)
    if not GATED:
        tl.store(to + other_column, other.to(out.dtype.element_ty), mask=(row < num_rows) & is_other_there)


@own_kernel
@triton.jit
def _four(tiles):  # type: ignore[no-untyped-def]  # compiled by Triton
    return tl.load(tiles), tl.load(tiles + 32), tl.load(tiles + 64), tl.load(tiles + 96)


@own_kernel
@triton.jit
def _four_of(tiles, is_row):  # type: ignore[no-untyped-def]  # compiled by Triton
    return (
        tl.load(tiles, mask=is_row, other=0.0),
        tl.load(tiles + 32, mask=is_row, other=0.0),
        tl.load(tiles + 64, mask=is_row, other=0.0),
        tl.load(tiles + 96, mask=is_row, other=0.0),
    )


_OUTPUTS = "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f"
_SUMS = "f,f,f,f,f,f,f,f"


def _products(first: int, second: int, values: int, sums: int, at: int) -> str:
    """Sums `at` to `at + 3`: 16 numbers of the 16 rows whose registers begin at `first` and `second`, and 16 more."""
    out = ", ".join(f"${at + i}" for i in range(4))
    before = ", ".join(f"${sums + at + i}" for i in range(4))
    lines = []
    for half, added in ((0, before), (2, out)):
        rows = ", ".join(f"${register + half + i}" for i in range(2) for register in (first, second))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.DTYPE.DTYPE.f32 {{{out}}}, {{{rows}}}, "
            f"{{${values + half}, ${values + half + 1}}}, {{{added}}};"
        )
    return "\n\t".join(lines)


def _asm(operands: list[tuple[int, int, int]], num_registers: int, dtype: str) -> tl.constexpr:
    """For the first and the last four sums: the registers of 16 rows of a weight, and of eight of `x`."""
    sums = 8 + num_registers
    lines = [_products(*operand, sums, 4 * i) for i, operand in enumerate(operands)]
    return tl.constexpr("\n\t".join(lines).replace("DTYPE", dtype))


def _constraints(num_registers: int) -> tl.constexpr:
    return tl.constexpr(",".join([_OUTPUTS, *["r"] * num_registers, _SUMS]))


_TWO_GROUPS = [(8, 12, 16), (8, 12, 20)]
_ONE_GROUP = [(8, 12, 24), (16, 20, 24)]
_TWO_GROUPS_BF16, _TWO_GROUPS_F16 = _asm(_TWO_GROUPS, 16, "bf16"), _asm(_TWO_GROUPS, 16, "f16")
_ONE_GROUP_BF16, _ONE_GROUP_F16 = _asm(_ONE_GROUP, 20, "bf16"), _asm(_ONE_GROUP, 20, "f16")
_TWO_GROUPS_REGISTERS, _ONE_GROUP_REGISTERS = _constraints(16), _constraints(20)


@own_kernel
@triton.jit
def _two_groups(a, b, v, m, sums, IS_HALF: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 rows of the weight by eight of `x`, and eight more."""
    if EMULATED:
        return sums + _emulated(a, b, a, b, v, m)
    return tl.inline_asm_elementwise(
        _TWO_GROUPS_F16 if IS_HALF else _TWO_GROUPS_BF16, _TWO_GROUPS_REGISTERS, [a, b, v, m, sums],
        dtype=tl.float32, is_pure=True, pack=8,
    )  # fmt: skip


@own_kernel
@triton.jit
def _one_group(a, b, c, d, v, sums, IS_HALF: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 rows of the weight, and 16 more, by eight of `x`."""
    if EMULATED:
        return sums + _emulated(a, b, c, d, v, v)
    return tl.inline_asm_elementwise(
        _ONE_GROUP_F16 if IS_HALF else _ONE_GROUP_BF16, _ONE_GROUP_REGISTERS, [a, b, c, d, v, sums],
        dtype=tl.float32, is_pure=True, pack=8,
    )  # fmt: skip


@own_kernel
@triton.jit
def _emulated(a, b, c, d, v, m):  # type: ignore[no-untyped-def]  # run by Triton's interpreter
    """`[W * 8, 32]`: of each of eight rows, four times (`a`, `b` by `v`, then `c`, `d` by `m`) two sums."""
    first = tl.join(_by(a, v), _by(b, v))
    second = tl.join(_by(c, m), _by(d, m))
    both = tl.reshape(tl.join(first, second), [a.shape[0], 4, 2, 2, 2])
    return tl.reshape(tl.permute(both, [0, 1, 4, 3, 2]), [a.shape[0], 32])


@own_kernel
@triton.jit
def _by(rows, others):  # type: ignore[no-untyped-def]  # run by Triton's interpreter
    """Eight rows and eight others of each warp, `[W * 8, K]` both, to `[W * 8, 8]`."""
    rows = tl.reshape(rows.to(tl.float32), [rows.shape[0] // 8, 8, 1, rows.shape[1]])
    others = tl.reshape(others.to(tl.float32), [others.shape[0] // 8, 1, 8, others.shape[1]])
    return tl.reshape(tl.sum(rows * others, 3), [rows.shape[0] * 8, 8])


_register = OverlappedKernel(register_kernel)
