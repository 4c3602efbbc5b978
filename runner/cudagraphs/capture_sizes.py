"""The choice of batch sizes to capture, and the batch descriptors of each kind of graph."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.errors import ConfigError

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
"""Sizes at which a matmul takes about as long as reading its weights, so that padding between them costs little."""

SMALL_MIXED_SIZES = (16, 64, 96)
"""The small sizes of batches that are no uniform decode, where those have graphs of their own.

A batch of fewer than 128 tokens that holds a prompt is rare, and on an H200 a step of Qwen3-0.6B takes 0.1 ms longer
with 16 tokens than with 4, and 0.03 longer with 64 than with 32, where a graph takes a start 30 to 50 ms.
"""

SIZES_ON_A_CPU = (1, 2, 4, 6, 8)
"""The sizes of a CPU's recorded graphs: with more tokens, what a step computes takes far longer than its Python."""

NUM_FIRST_DRAFT_TOKENS = 2
"""The tokens of a request that the first pass of a draft model reads: the newest, and the one before it."""


def default_capture_sizes(max_num_batched_tokens: int, small_sizes: Sequence[int] = SMALL_SIZES) -> tuple[int, ...]:
    """Return `small_sizes`, then 128, 160, 192, 224, 256, 320, … (four per power of two) up to the prefill chunk.

    There are few sizes, because each costs every start a warm-up and a capture: 35 up to 8192 tokens, 15 of them up
    to 256; with `SMALL_MIXED_SIZES` 28. Above 128 padding is at most a fifth of the computed rows, and a decode batch
    has at most 31 padded rows, which attend to nothing.
    """
    sizes = list(small_sizes)
    power = 128
    while power < max_num_batched_tokens:
        sizes += [power * quarters // 4 for quarters in (4, 5, 6, 7)]
        power *= 2
    fitting = [size for size in sizes if size < max_num_batched_tokens]
    return (*fitting, max_num_batched_tokens)


def check_capture_sizes(sizes: Sequence[int], max_num_batched_tokens: int) -> None:
    """Raise `ConfigError` unless `sizes` ascend, start at 1 or more and end at `max_num_batched_tokens` or below."""
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"cudagraph_capture_sizes has {size!r}; sizes are whole numbers of tokens, 1 or more.")
    if not sizes:
        raise ConfigError(
            "cudagraph_capture_sizes is empty; name sizes, or turn graphs off with cudagraph_mode='NONE'."
        )
    wanted = sorted(set(sizes))
    if list(sizes) != wanted:
        fault = "has duplicates" if len(wanted) != len(sizes) else "does not ascend"
        raise ConfigError(f"cudagraph_capture_sizes {fault}: {list(sizes)}. Give {wanted}.")
    if sizes[-1] > max_num_batched_tokens:
        raise ConfigError(
            f"cudagraph_capture_sizes ends at {sizes[-1]}, but a step computes at most max_num_batched_tokens="
            f"{max_num_batched_tokens} tokens; leave larger sizes out, or raise max_num_batched_tokens."
        )


def full_decode_descriptors(
    sizes: Sequence[int], max_num_seqs: int, uniform_token_count: int = 1
) -> tuple[BatchDescriptor, ...]:
    """Return the descriptors of uniform decode under FULL.

    These are the sizes that requests of `uniform_token_count` tokens fill exactly, and the size of `max_num_seqs`
    requests if it is at most the largest size, so that every decode batch has a graph.
    """
    counts = {
        size // uniform_token_count
        for size in sizes
        if size % uniform_token_count == 0 and size // uniform_token_count <= max_num_seqs
    }
    if sizes and max_num_seqs * uniform_token_count <= sizes[-1]:
        counts.add(max_num_seqs)
    return tuple(
        BatchDescriptor(num_tokens=count * uniform_token_count, num_reqs=count, uniform_token_count=uniform_token_count)
        for count in sorted(counts)
    )


def full_verification_descriptors(
    decode: Sequence[BatchDescriptor], num_drafts: int, max_num_batched_tokens: int
) -> tuple[BatchDescriptor, ...]:
    """Return the descriptors of batches in which each request verifies `num_drafts` drafts, under FULL.

    They are those of uniform decode, `decode`, with as many requests, as far as a step may compute so many tokens.
    """
    count = 1 + num_drafts
    return tuple(
        BatchDescriptor(num_tokens=num_reqs * count, num_reqs=num_reqs, uniform_token_count=count)
        for num_reqs in (one.num_reqs for one in decode)
        if num_reqs is not None and num_reqs * count <= max_num_batched_tokens
    )


def full_draft_descriptors(
    decode: Sequence[BatchDescriptor], num_first_tokens: int = NUM_FIRST_DRAFT_TOKENS
) -> tuple[BatchDescriptor, ...]:
    """Return the descriptors of the passes that draft, for as many requests as those of uniform decode, `decode`.

    All passes after a step are one graph; the first has the most tokens, `num_first_tokens` of each request.
    """
    return tuple(draft_descriptor(one.num_reqs, num_first_tokens) for one in decode if one.num_reqs is not None)


def draft_descriptor(num_reqs: int, num_first_tokens: int = NUM_FIRST_DRAFT_TOKENS) -> BatchDescriptor:
    """Return the descriptor of the graph that drafts for `num_reqs` requests, padding included."""
    return BatchDescriptor(
        num_tokens=num_reqs * num_first_tokens, num_reqs=num_reqs, uniform_token_count=num_first_tokens
    )


def full_mixed_descriptors(sizes: Sequence[int], max_num_seqs: int) -> tuple[BatchDescriptor, ...]:
    """Return the descriptors of mixed batches under FULL, with as many requests as the tokens allow."""
    return tuple(BatchDescriptor(num_tokens=size, num_reqs=min(size, max_num_seqs)) for size in sizes)


def piecewise_descriptors(sizes: Sequence[int]) -> tuple[BatchDescriptor, ...]:
    """Return the descriptors under PIECEWISE, which pads tokens only."""
    return tuple(BatchDescriptor(num_tokens=size) for size in sizes)
