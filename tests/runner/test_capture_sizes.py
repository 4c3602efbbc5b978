"""Which sizes are captured, and that every batch they are for fits one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.errors import ConfigError
from piecegraph.runner.capture_sizes import (
    check_capture_sizes,
    default_capture_sizes,
    full_decode_descriptors,
    full_mixed_descriptors,
    piecewise_descriptors,
)


def test_the_default_sizes() -> None:
    sizes = default_capture_sizes(2048)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert {248, 256, 272, 288, 496, 512} <= set(sizes) and not {260, 264, 504} & set(sizes)
    assert sizes[-1] == 2048


@given(st.integers(1, 70_000))
def test_default_sizes_are_valid_and_end_at_the_prefill_chunk(max_num_batched_tokens: int) -> None:
    sizes = default_capture_sizes(max_num_batched_tokens)
    check_capture_sizes(sizes, max_num_batched_tokens)
    assert sizes[-1] == max_num_batched_tokens


@given(st.integers(513, 70_000), st.data())
def test_padding_on_the_ladder_is_at_most_a_quarter(max_num_batched_tokens: int, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(513, max_num_batched_tokens))
    padded = next(size for size in default_capture_sizes(max_num_batched_tokens) if size >= num_tokens)
    assert (padded - num_tokens) / padded <= 0.24


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
    """97 to 100 requests would find none between 96 and 104."""
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
