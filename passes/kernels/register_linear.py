"""Linears of two to eight rows on tensor cores, weights from memory straight to the registers that multiply them.

A tensor core multiplies 16 rows of a weight by eight of `x`, 16 numbers of each at a time, and a thread of the warp
holds a few numbers of two of those rows. Which numbers does not matter to a sum, as long as both sides agree: so each
thread loads eight in a row, sixteen bytes, and calls them its pairs of two products. Nothing goes through shared
memory, no warp waits for another until the sums are added at the end, and a warp has tiles ahead on its way.

Sixteen rows side by side would be read 64 bytes each at a time, which memory does not like: half as fast, measured. So
what the tensor core takes for 16 rows are four rows of the weight, of each four stretches of 32 numbers, 256 bytes. It
multiplies all of them by each of the four stretches of `x`, and of its products one in four counts. Tensor cores have
nothing else to do; the numbers of more than eight rows of `x`, which every warp reads, would take longer.

Source: the layout of `mma.m16n8k16` operands in PTX ISA, "Warp-level matrix instructions".
"""

from __future__ import annotations

import logging
import re

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from piecegraph.passes.kernels.gated import gated
from piecegraph.passes.kernels.linear_config import RegisterConfig
from piecegraph.passes.kernels.overlapped import OverlappedKernel
from piecegraph.passes.kernels.own_kernel import check_with, own_kernel

logger = logging.getLogger(__name__)


def register_linear_on_gpu(
    x: torch.Tensor,  # [num_rows, size], contiguous, at most eight rows
    weight: torch.Tensor,  # [num_columns, size] or, gated, [2 * num_columns, size], contiguous
    bias: torch.Tensor | None,  # as many as the weight has rows
    activation: str,  # "": none
    config: RegisterConfig,
) -> torch.Tensor:
    """`x @ weight.T + bias`, or with an activation `act(gate) * up` of its two halves; `[num_rows, num_columns]`."""
    num_rows, size = x.shape
    num_columns = weight.shape[0] // (2 if activation else 1)
    out = x.new_empty((num_rows, num_columns))
    _register.launch(
        (triton.cdiv(num_columns, config.columns_of(bool(activation))), 1, 1),
        (x, weight, bias, out, num_columns, size, num_rows),
        {
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
    size,  # a multiple of SLICES * 256
    num_rows,  # at most eight
    SLICES: tl.constexpr,  # warps among which a row's numbers are divided
    WARPS: tl.constexpr,  # a multiple of SLICES: the others have other rows of the weight, eight each
    ACTIVATION: tl.constexpr,
    IS_HALF: tl.constexpr,  # float16, else bfloat16
    EMULATED: tl.constexpr,  # without tensor cores: for Triton's interpreter
    OVERLAP: tl.constexpr,
):
    """Grid: (column blocks,). Sums in float32."""
    GATED: tl.constexpr = ACTIVATION != ""
    COLUMNS: tl.constexpr = 4 if GATED else 8  # of a warp
    CHUNK: tl.constexpr = SLICES * 256  # twice four stretches of each warp, side by side
    line = tl.arange(0, WARPS * 8)[:, None]  # of a warp: of four stretches, two rows each
    warp, stretch = line // 8, line % 8 // 2
    from_slice = warp % SLICES * 256 + tl.arange(0, 32)[None, :]
    column = (tl.program_id(0) * (WARPS // SLICES) + warp // SLICES) * COLUMNS + line % 2

    # four times two rows of the weight; the tensor core takes the first two with the second, and the others
    last = num_columns - 1
    to_stretch = from_slice + stretch * 32
    first = weight + tl.minimum(column, last).to(tl.int64) * size + to_stretch
    third = weight + tl.minimum(column + COLUMNS // 2, last).to(tl.int64) * size + to_stretch
    if GATED:
        to_other = num_columns.to(tl.int64) * size
        second = first + to_other
        fourth = third + to_other
    else:
        second = weight + tl.minimum(column + 2, last).to(tl.int64) * size + to_stretch
        fourth = weight + tl.minimum(column + 6, last).to(tl.int64) * size + to_stretch
    row = line % 8
    values = x + row.to(tl.int64) * size + from_slice
    is_row = row < num_rows

    if OVERLAP:
        gdc_launch_dependents()
    a0, b0, c0, d0 = tl.load(first), tl.load(second), tl.load(third), tl.load(fourth)
    a1, b1, c1, d1 = tl.load(first + 128), tl.load(second + 128), tl.load(third + 128), tl.load(fourth + 128)
    if OVERLAP:
        gdc_wait()
    p0, p1, p2, p3 = _zeros(WARPS), _zeros(WARPS), _zeros(WARPS), _zeros(WARPS)  # by each stretch of x
    for start in range(0, size, CHUNK):
        v0, v1, v2, v3 = _stretches(values + start, is_row)
        w0, w1, w2, w3 = _stretches(values + start + 128, is_row)
        at_a0, at_b0, at_c0, at_d0, at_a1, at_b1, at_c1, at_d1 = a0, b0, c0, d0, a1, b1, c1, d1
        ahead = start + CHUNK
        if ahead < size:
            a0, b0 = tl.load(first + ahead), tl.load(second + ahead)
            c0, d0 = tl.load(third + ahead), tl.load(fourth + ahead)
            a1, b1 = tl.load(first + ahead + 128), tl.load(second + ahead + 128)
            c1, d1 = tl.load(third + ahead + 128), tl.load(fourth + ahead + 128)
        p0 = _products(at_a0, at_b0, at_c0, at_d0, v0, p0, IS_HALF, EMULATED)
        p1 = _products(at_a0, at_b0, at_c0, at_d0, v1, p1, IS_HALF, EMULATED)
        p2 = _products(at_a0, at_b0, at_c0, at_d0, v2, p2, IS_HALF, EMULATED)
        p3 = _products(at_a0, at_b0, at_c0, at_d0, v3, p3, IS_HALF, EMULATED)
        p0 = _products(at_a1, at_b1, at_c1, at_d1, w0, p0, IS_HALF, EMULATED)
        p1 = _products(at_a1, at_b1, at_c1, at_d1, w1, p1, IS_HALF, EMULATED)
        p2 = _products(at_a1, at_b1, at_c1, at_d1, w2, p2, IS_HALF, EMULATED)
        p3 = _products(at_a1, at_b1, at_c1, at_d1, w3, p3, IS_HALF, EMULATED)
    sums = tl.where(stretch < 2, tl.where(stretch == 0, p0, p1), tl.where(stretch == 2, p2, p3))
    _write(out, bias, sums, num_rows, num_columns, SLICES, WARPS, COLUMNS, ACTIVATION)


@own_kernel
@triton.jit
def _zeros(WARPS: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled by Triton
    return tl.zeros([WARPS * 8, 32], tl.float32)


@own_kernel
@triton.jit
def _stretches(tiles, is_row):  # type: ignore[no-untyped-def]  # compiled by Triton
    return (
        tl.load(tiles, mask=is_row, other=0.0),
        tl.load(tiles + 32, mask=is_row, other=0.0),
        tl.load(tiles + 64, mask=is_row, other=0.0),
        tl.load(tiles + 96, mask=is_row, other=0.0),
    )


@own_kernel
@triton.jit
def _write(  # type: ignore[no-untyped-def]  # compiled by Triton
    out,
    bias,
    sums,  # of a warp [4, 2, 32]: stretches; two rows; four times two rows of x, first or last pairs, which of a pair
    num_rows,
    num_columns,
    SLICES: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add slices and stretches, and write the rows of `out`."""
    GATED: tl.constexpr = ACTIVATION != ""
    SUMS: tl.constexpr = WARPS // SLICES * 32
    total = tl.sum(tl.reshape(sums, [WARPS // SLICES, SLICES * 4, 2, 32]), 1)
    total = tl.reshape(total, [WARPS // SLICES, 2, 4, 2, 2, 2])
    one, other = tl.split(tl.permute(total, [0, 1, 2, 3, 5, 4]))
    one, other = tl.reshape(one, [SUMS]), tl.reshape(other, [SUMS])
    index = tl.arange(0, SUMS)
    row = index // 4 % 4 * 2 + index % 2
    column = (tl.program_id(0) * (WARPS // SLICES) + index // 32) * COLUMNS + index // 16 % 2
    column += index // 2 % 2 * (COLUMNS // 2)
    other_column = column + (num_columns if GATED else 2)
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


def _asm(dtype: str) -> tl.constexpr:
    """Registers 0 to 7 of the result: 16 lines by eight rows of `x`, and 16 more lines by the same. 8 to 23 hold the
    lines, four each of which two and two are one operand, 24 to 27 the rows of `x`, 28 to 35 what is added."""
    lines = []
    for at, (one, other) in ((0, (8, 12)), (4, (16, 20))):
        out = ", ".join(f"${at + i}" for i in range(4))
        for half, added in ((0, ", ".join(f"${28 + at + i}" for i in range(4))), (2, out)):
            operand = ", ".join(f"${register + half + i}" for i in range(2) for register in (one, other))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{{out}}}, {{{operand}}}, "
                f"{{${24 + half}, ${25 + half}}}, {{{added}}};"
            )
    return tl.constexpr("\n\t".join(lines))


_BF16, _F16 = _asm("bf16"), _asm("f16")
_REGISTERS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 20 + ["f"] * 8))


@own_kernel
@triton.jit
def _products(a, b, c, d, v, sums, IS_HALF: tl.constexpr, EMULATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`sums` and, of each of eight lines of `a` to `d`, its products by the eight rows of `v`."""
    if EMULATED:
        return sums + _emulated(a, b, c, d, v)
    return tl.inline_asm_elementwise(
        _F16 if IS_HALF else _BF16, _REGISTERS, [a, b, c, d, v, sums], dtype=tl.float32, is_pure=True, pack=8
    )


@own_kernel
@triton.jit
def _emulated(a, b, c, d, v):  # type: ignore[no-untyped-def]  # run by Triton's interpreter
    """`[W * 8, 32]`: of each line four times (`a`, `b`, then `c`, `d`) two products."""
    both = tl.join(tl.join(_by(a, v), _by(b, v)), tl.join(_by(c, v), _by(d, v)))
    both = tl.reshape(both, [a.shape[0], 4, 2, 2, 2])
    return tl.reshape(tl.permute(both, [0, 1, 4, 3, 2]), [a.shape[0], 32])


@own_kernel
@triton.jit
def _by(rows, others):  # type: ignore[no-untyped-def]  # run by Triton's interpreter
    """Eight rows and eight others of each warp, `[W * 8, K]` both, to `[W * 8, 8]`."""
    rows = tl.reshape(rows.to(tl.float32), [rows.shape[0] // 8, 8, 1, rows.shape[1]])
    others = tl.reshape(others.to(tl.float32), [others.shape[0] // 8, 1, 8, others.shape[1]])
    return tl.reshape(tl.sum(rows * others, 3), [rows.shape[0] * 8, 8])


class UnknownLayoutError(RuntimeError):
    """Triton lays tiles out as the kernel does not expect."""


def check_layout(ttgir: str) -> None:
    """Raise `UnknownLayoutError` unless a thread holds eight numbers in a row, and four threads a line, as tensor cores
    take them: Triton chooses that, and may come to choose otherwise."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*?)\}", ttgir, re.MULTILINE))
    taken = {name for line in ttgir.splitlines() if "elementwise_inline_asm" in line for name in _LAYOUT.findall(line)}
    other = [layouts.get(name, name) for name in sorted(taken) if not _WANTED.fullmatch(layouts.get(name, ""))]
    if other or not taken:
        raise UnknownLayoutError(f"this Triton lays tiles out as {other or 'nothing that can be looked at'}")


_LAYOUT = re.compile(r"tensor<\w+, (#\w+)>")
"""Of a tensor in TTGIR, its layout's name."""

_WANTED = re.compile(r"sizePerThread = \[1, 8\], threadsPerWarp = \[8, 4\], warpsPerCTA = \[\d+, 1\], order = \[1, 0\]")

if hasattr(register_kernel, "create_binder"):  # not in Triton's interpreter
    check_with(register_kernel, check_layout)

_register = OverlappedKernel(register_kernel)


class _State:
    """Process-wide, as Triton is."""

    refused = ""  # why the kernel is not taken any more


def can_go_to_registers(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """The kernel loads sixteen bytes at a time; and it was not refused."""
    return not _State.refused and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0


def refuse(reason: UnknownLayoutError) -> None:
    """From now on take other kernels: slower ones, and as right."""
    if not _State.refused:
        logger.warning("linears of two to eight rows take slower kernels: %s", reason)
    _State.refused = str(reason)
