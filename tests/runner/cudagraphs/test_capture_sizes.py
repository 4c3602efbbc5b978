"""The captured sizes, one of which holds every batch that they are for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.errors import ConfigError
from piecegraph.runner.common.config_on_device import DEFAULT_COMPILE_SIZES
from piecegraph.runner.cudagraphs.capture_sizes import (
    SMALL_MIXED_SIZES,
    check_capture_sizes,
    default_capture_sizes,
    full_decode_descriptors,
    full_mixed_descriptors,
    piecewise_descriptors,
)


def test_the_default_sizes() -> None:
    small = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
    large = (320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
    assert default_capture_sizes(2048) == small + large
    assert default_capture_sizes(700) == (*small, *large[:5], 700)
    assert default_capture_sizes(40) == (*small[:7], 40)


def test_a_start_captures_few_graphs() -> None:
    """By default there is one decode bucket per size up to 256, and one bucket per size for other batches."""
    sizes = default_capture_sizes(8192)
    assert len(sizes) == 35
    assert len(full_decode_descriptors(sizes, 256)) == 15
    assert len(piecewise_descriptors(default_capture_sizes(8192, SMALL_MIXED_SIZES))) == 28


def test_every_default_compile_size_is_a_bucket() -> None:
    """A static piece runs only where a batch is padded to its very size."""
    assert set(DEFAULT_COMPILE_SIZES) <= set(default_capture_sizes(256))


@given(st.integers(1, 70_000))
def test_default_sizes_are_valid_and_end_at_the_prefill_chunk(max_num_batched_tokens: int) -> None:
    sizes = default_capture_sizes(max_num_batched_tokens)
    check_capture_sizes(sizes, max_num_batched_tokens)
    assert sizes[-1] == max_num_batched_tokens


@given(st.integers(129, 70_000), st.data())
def test_padding_above_128_is_at_most_a_fifth(max_num_batched_tokens: int, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(129, max_num_batched_tokens))
    padded = next(size for size in default_capture_sizes(max_num_batched_tokens) if size >= num_tokens)
    assert (padded - num_tokens) / padded <= 0.2


@given(st.integers(1, 256), st.integers(1, 256))
def test_a_decode_batch_is_padded_by_at_most_31_rows(num_reqs: int, max_num_seqs: int) -> None:
    num_reqs = min(num_reqs, max_num_seqs)
    descriptors = full_decode_descriptors(default_capture_sizes(8192), max_num_seqs)
    padded = next(d.num_tokens for d in descriptors if d.num_tokens >= num_reqs)
    assert padded - num_reqs <= 31


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4, 2], "does not ascend: [4, 2]. Give [2, 4]."),
        ([2, 2, 4], "has duplicates: [2, 2, 4]. Give [2, 4]."),
        ([0, 1], "has 0; sizes are whole numbers of tokens, 1 or more."),
        ([1.5], "has 1.5; sizes are whole numbers"),
        ([True], "has True; sizes are whole numbers"),
        ([], "is empty; name sizes, or turn graphs off with cudagraph_mode='NONE'."),
        ([8, 65], "ends at 65, but a step computes at most max_num_batched_tokens=64 tokens"),
    ],
)
def test_bad_sizes_are_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_capture_sizes(sizes, 64)


def test_full_decode_has_a_bucket_for_the_fullest_batch() -> None:
    """97 to 100 requests would find none between 96 and 128."""
    descriptors = full_decode_descriptors(default_capture_sizes(512), 100)
    assert descriptors[-1] == BatchDescriptor(num_tokens=100, num_reqs=100, uniform_token_count=1)
    assert descriptors[-2].num_reqs == 96


def test_full_decode_of_several_tokens_a_request() -> None:
    descriptors = full_decode_descriptors((1, 2, 4, 8, 16), 3, uniform_token_count=2)
    assert [(d.num_tokens, d.num_reqs) for d in descriptors] == [(2, 1), (4, 2), (6, 3)]


def test_full_decode_stays_within_the_sizes_given() -> None:
    assert [d.num_reqs for d in full_decode_descriptors((1, 2), 100)] == [1, 2]


def test_other_descriptors() -> None:
    assert full_mixed_descriptors((1, 64), 8) == (
        BatchDescriptor(num_tokens=1, num_reqs=1),
        BatchDescriptor(num_tokens=64, num_reqs=8),
    )
    assert piecewise_descriptors((1, 64)) == (BatchDescriptor(num_tokens=1), BatchDescriptor(num_tokens=64))
