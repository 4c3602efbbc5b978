"""The sizes that are picked cost least: no other choice of as many sizes costs less."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.capture_sizes import default_capture_sizes, full_decode_descriptors
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes
from piecegraph.runner.traffic.pick_sizes import CostModel, Histogram, cost_model, pick_sizes, total_cost

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
LINEAR = cost_model(MeasuredTimes())
TOP = 16

steps = st.dictionaries(st.integers(1, TOP), st.integers(1, 50), max_size=6)
jumps = st.lists(st.integers(0, 20), min_size=TOP, max_size=TOP)


@given(steps, steps, jumps, jumps, st.integers(1, 5), st.integers(1, TOP))
def test_no_other_sizes_cost_less(
    decode: dict[int, int], mixed: dict[int, int], dt: list[int], mt: list[int], count: int, max_num_seqs: int
) -> None:
    """Against every choice of sizes, for any times that do not decrease."""
    model = CostModel(decode=lambda n: 1.0 + sum(dt[:n]), mixed=lambda n: 1.0 + sum(mt[:n]), is_measured=True)
    histogram = Histogram(decode=decode, mixed=mixed, max_num_seqs=max_num_seqs, max_num_tokens=TOP)
    sizes = pick_sizes(histogram, count=count, model=model)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == TOP and len(sizes) <= count
    shapes = sorted({*histogram.clipped().decode, *histogram.clipped().mixed} - {TOP})
    others = [
        (*other, TOP) for length in range(min(count - 1, len(shapes)) + 1) for other in combinations(shapes, length)
    ]
    assert total_cost(histogram, sizes, model) == pytest.approx(min(total_cost(histogram, o, model) for o in others))


def test_traffic_at_odd_sizes_gets_these_sizes() -> None:
    """5 requests in most steps, and prompts of 37 tokens: the default ladder pads to 8 and 48."""
    histogram = Histogram(decode={5: 100, 6: 1}, mixed={37: 10}, max_num_seqs=8, max_num_tokens=64)
    assert pick_sizes(histogram, count=3, model=LINEAR) == (5, 38, 64)  # 37 is between two candidates
    assert pick_sizes(histogram, count=1, model=LINEAR) == (64,)
    default = default_capture_sizes(64)
    best = pick_sizes(histogram, count=len(default), model=LINEAR)
    assert total_cost(histogram, best, LINEAR) < total_cost(histogram, default, LINEAR)


def test_the_cost_is_that_of_the_buckets_which_are_captured() -> None:
    """Decode batches also have the bucket of `max_num_seqs` requests."""
    histogram = Histogram(decode={5: 2, 9: 1}, mixed={9: 1}, max_num_seqs=6, max_num_tokens=16)
    captured = [one.num_tokens for one in full_decode_descriptors((4, 16), 6)]
    assert captured == [4, 6]
    tokens = CostModel(decode=float, mixed=float, is_measured=False)
    assert total_cost(histogram, (4, 16), tokens) == 3 * 6 + 16  # 9 requests are more than such an engine runs


def test_measured_times_decide_where_there_are_some() -> None:
    def decode(size: int) -> BatchDescriptor:
        return BatchDescriptor(num_tokens=size, num_reqs=size, uniform_token_count=1)

    graphs = {(FULL, decode(1)): 1.0, (FULL, decode(4)): 4.0, (PIECEWISE, BatchDescriptor(num_tokens=2)): 9.0}
    model = cost_model(MeasuredTimes(graphs))
    assert model.is_measured
    assert [model.decode(n) for n in (1, 2, 4, 6)] == [1.0, 2.0, 4.0, 6.0]
    assert model.mixed(2) == 2.0  # one time of PIECEWISE tells nothing; those of FULL stand for it
    noisy = cost_model(MeasuredTimes({**graphs, (FULL, decode(3)): 5.0}))
    assert noisy.decode(4) == noisy.decode(3) == 5.0
    assert not LINEAR.is_measured and LINEAR.decode(10) - LINEAR.decode(4) == 6


@given(st.integers(1, 5000))
def test_a_large_size_is_padded_by_a_sixteenth_at_most(size: int) -> None:
    (picked, top) = pick_sizes(
        Histogram(decode={}, mixed={size: 1}, max_num_seqs=1, max_num_tokens=8192), count=2, model=LINEAR
    )
    assert top == 8192 and size <= picked <= size * (1 + 1 / 16)
