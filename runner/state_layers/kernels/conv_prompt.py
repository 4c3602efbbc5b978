"""The convolution of segments of prompts, continued from the window before each, in one launch.

torch has a depthwise convolution for equally long inputs whose tokens lie last. Segments would be transposed, convolved
one by one and transposed back; this kernel reads the rows of a step where they are. What a recurrence takes as several
tensors, such as query, key and value, is written as such: a library would copy views of one tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import own_kernel


@own_kernel
@triton.jit(do_not_specialize=["num_rows"])
def conv_prompt_kernel(  # type: ignore[no-untyped-def]  # compiled by Triton
    x,  # [num_tokens, channels]
    weight,  # [channels, KERNEL_SIZE]
    bias,  # [channels] or None
    windows,  # [num_segments, channels, KERNEL_SIZE - 1]: before the segments
    out,  # [num_rows, channels], or [num_rows, FIRST_END], [num_rows, SECOND_END - FIRST_END] and the rest; written
    after,  # [num_segments, channels, KERNEL_SIZE - 1]: the windows after them
    rows,  # [num_rows] int64, rows of `x`; those of a segment are consecutive
    cu_seqlens,  # [num_segments + 1] int64
    chunks,  # [num_chunks, 2] int64: each chunk's segment, and its number there
    num_rows,
    channels,
    x_stride,
    weight_stride,
    FIRST_END: tl.constexpr,  # channels of the first part, a multiple of BLOCK_C; 0: there is one part
    SECOND_END: tl.constexpr,  # channels of the first two parts, likewise
    KERNEL_SIZE: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program, a divisor of CHUNK_SIZE
    BLOCK_C: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    """Compute tokens of a segment in a block of channels; the program with the last ones keeps the window after them.

    Grid: (chunks * parts of a chunk, channel blocks).
    """
    PARTS: tl.constexpr = CHUNK_SIZE // TOKENS
    chunk = tl.program_id(0) // PARTS
    block = tl.program_id(1) * BLOCK_C
    channel = block + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    segment = tl.load(chunks + chunk * 2)
    number = tl.load(chunks + chunk * 2 + 1)
    begin = tl.load(cu_seqlens + segment)
    count = tl.load(cu_seqlens + segment + 1) - begin
    first = number * CHUNK_SIZE + tl.program_id(0) % PARTS * TOKENS
    if first >= count:
        return
    WIDTH: tl.constexpr = KERNEL_SIZE - 1
    inputs = x + tl.load(rows + begin) * x_stride
    window = windows + segment * channels * WIDTH + channel * WIDTH
    token = first + tl.arange(0, TOKENS)
    is_token = token < count
    result = tl.zeros([TOKENS, BLOCK_C], tl.float32)
    for tap in tl.static_range(KERNEL_SIZE):
        source = token + (tap - WIDTH)
        is_now = is_token & (source >= 0)
        value = tl.load(
            inputs + source[:, None] * x_stride + channel[None, :], mask=is_now[:, None] & is_channel[None, :], other=0
        ).to(tl.float32)
        if first < WIDTH:  # tokens before the segment's are in the window
            earlier = tl.load(
                window[None, :] + (WIDTH + source)[:, None],
                mask=(is_token & (source < 0))[:, None] & is_channel[None, :],
                other=0,
            )
            value += earlier.to(tl.float32)  # one of both is 0
        taps = tl.load(weight + channel * weight_stride + tap, mask=is_channel, other=0).to(tl.float32)
        result += value * taps[None, :]
    if bias is not None:
        result += tl.load(bias + channel, mask=is_channel, other=0).to(tl.float32)[None, :]
    if IS_SILU:
        result = result * tl.sigmoid(result)
    to = out + (begin + token)[:, None] * channels + channel[None, :]
    if FIRST_END:
        part = tl.where(block < FIRST_END, 0, tl.where(block < SECOND_END, FIRST_END, SECOND_END))
        end = tl.where(block < FIRST_END, FIRST_END, tl.where(block < SECOND_END, SECOND_END, channels))
        part, width = tl.multiple_of(part, BLOCK_C), tl.multiple_of(end - part, BLOCK_C)
        to = out + num_rows * part.to(tl.int64) + (begin + token)[:, None] * width + (channel - part)[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_token[:, None] & is_channel[None, :])
    if first + TOKENS >= count:
        kept = after + segment * channels * WIDTH + channel * WIDTH
        for tap in tl.static_range(WIDTH):
            place = count + (tap - WIDTH)
            if place >= 0:
                last = tl.load(inputs + place * x_stride + channel, mask=is_channel, other=0)
                tl.store(kept + tap, last.to(after.dtype.element_ty), mask=is_channel)
            else:
                last = tl.load(window + (WIDTH + place), mask=is_channel, other=0)
                tl.store(kept + tap, last.to(after.dtype.element_ty), mask=is_channel)
