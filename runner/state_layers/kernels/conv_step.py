"""The convolution of the few tokens of each request that a decode step computes, continued from its last inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel
from piecegraph.runner.state_layers.kernels.request import keep_state, load_request, load_state


@own_kernel
@triton.jit
def conv_step_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_tokens, channels]
    weight,  # [channels, KERNEL_SIZE]
    bias,  # [channels] or None
    out,  # [num_tokens, channels]
    windows,  # [num_blocks, channels, KERNEL_SIZE - 1]
    places,  # [num_rows * NUM_PLACES, channels, KERNEL_SIZE - 1] or None
    before,  # [num_reqs, channels, KERNEL_SIZE - 1]: a copy of the windows that requests begin with; None: one token
    query_start_loc,
    seq_lens,
    block_table,
    slot_mapping,
    idx_mapping,
    prefill_lens,
    channels,
    x_stride,
    weight_stride,
    out_stride,
    block_stride,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    """Compute the tokens of one request in a block of channels, and keep the windows after them."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    start, count, first, is_kept, decodes, is_in_place, row = load_request(
        request, query_start_loc, seq_lens, slot_mapping, idx_mapping, prefill_lens, NUM_PLACES > 0
    )
    WIDTH: tl.constexpr = KERNEL_SIZE - 1
    tap = tl.arange(0, BLOCK_K)
    at = channel[:, None] * WIDTH + tap[None, :]  # in a window
    is_window = is_channel[:, None] & (tap < WIDTH)[None, :]
    old = tl.zeros([BLOCK_C, BLOCK_K], windows.dtype.element_ty)
    old = load_state(
        old, windows, places, at, is_window, channels * WIDTH, block_stride, block_table, request, row, first, is_kept,
        is_in_place, TABLE_STRIDE, BLOCK_SIZE, PAGES, NUM_PLACES,
    )  # fmt: skip
    weights = tl.load(
        weight + channel[:, None] * weight_stride + tap[None, :],
        mask=is_channel[:, None] & (tap < KERNEL_SIZE)[None, :],
        other=0.0,
    ).to(tl.float32)
    if before is None:
        _one_token(
            x, bias, out, windows, places, old, weights, at, is_channel, channel, tap, start, count, first, is_kept,
            decodes, row, request, block_table, channels, x_stride, out_stride, block_stride, TABLE_STRIDE, BLOCK_SIZE,
            PAGES, NUM_PLACES, WIDTH, IS_SILU,
        )  # fmt: skip
    else:
        copied = before + request.to(tl.int64) * channels * WIDTH
        tl.store(copied + at, old, mask=is_window)
        tl.debug_barrier()  # a window is read from the copy alone: blocks and places are written meanwhile
        for token in range(count):
            source = token - WIDTH + tap  # of each tap, the token; negative: in the window before
            inputs = _inputs(x, copied, start, channel, source, channels, x_stride, WIDTH, KERNEL_SIZE, is_channel, tap)
            result = tl.sum(inputs.to(tl.float32) * weights, axis=1)
            if bias is not None:
                result += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
            if IS_SILU:
                result = result * tl.sigmoid(result)
            tl.store(out + (start + token) * out_stride + channel, result.to(out.dtype.element_ty), mask=is_channel)
            if is_kept:
                window = _inputs(
                    x, copied, start, channel, source + 1, channels, x_stride, WIDTH, WIDTH, is_channel, tap
                ).to(windows.dtype.element_ty)
                keep_state(
                    window, windows, places, at, is_window, channels * WIDTH, block_stride, block_table, request, row,
                    first + token, token == count - 1, decodes, TABLE_STRIDE, BLOCK_SIZE, PAGES, NUM_PLACES,
                )  # fmt: skip


@own_kernel
@triton.jit
def _one_token(  # type: ignore[no-untyped-def]  # compiled by Triton
    x, bias, out, windows, places, old, weights, at, is_channel, channel, tap, start, count, first, is_kept, decodes,
    row, request, block_table, channels, x_stride, out_stride, block_stride, TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr, NUM_PLACES: tl.constexpr, WIDTH: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """Compute the only token of a request, if it has one: the window moves by one, and needs no copy."""
    is_there = channel < tl.where(count > 0, channels, 0)
    now = tl.load(x + start * x_stride + channel, mask=is_there, other=0.0).to(tl.float32)
    inputs = tl.where((tap == WIDTH)[None, :], now[:, None], old.to(tl.float32))
    result = tl.sum(inputs * weights, axis=1)
    if bias is not None:
        result += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    if IS_SILU:
        result = result * tl.sigmoid(result)
    tl.store(out + start * out_stride + channel, result.to(out.dtype.element_ty), mask=is_there)
    if is_kept & (count > 0):
        is_moved = is_channel[:, None] & ((tap > 0) & (tap <= WIDTH))[None, :]
        tl.debug_barrier()  # all threads have read the window, which may be written in its place
        keep_state(
            inputs.to(windows.dtype.element_ty), windows, places, at - 1, is_moved, channels * WIDTH, block_stride,
            block_table, request, row, first, True, decodes, TABLE_STRIDE, BLOCK_SIZE, PAGES, NUM_PLACES,
        )  # fmt: skip


@own_kernel
@triton.jit
def _inputs(  # type: ignore[no-untyped-def]  # compiled by Triton
    x, copied, start, channel, source, channels, x_stride, WIDTH: tl.constexpr, SIZE: tl.constexpr, is_channel, tap
):
    """Return the inputs `[BLOCK_C, BLOCK_K]` of the tokens `source` `[BLOCK_K]`, of which the first `SIZE` count."""
    is_tap = is_channel[:, None] & (tap < SIZE)[None, :]
    is_before = (source < 0)[None, :]
    earlier = tl.load(copied + channel[:, None] * WIDTH + (WIDTH + source)[None, :], mask=is_tap & is_before, other=0.0)
    now = tl.load(
        x + (start + source)[None, :] * x_stride + channel[:, None], mask=is_tap & (is_before == 0), other=0.0
    )
    return tl.where(is_before, earlier.to(tl.float32), now.to(tl.float32))
