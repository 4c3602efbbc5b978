"""The ranges of a tensor that ranks hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.runner.tensor_parallel.shards import HeadSplit, even_shard


@settings(deadline=None)
@given(full_size=st.integers(1, 40), num_ranks=st.integers(1, 9), packed=st.integers(1, 3))
def test_even_parts_cover_everything_once(full_size: int, num_ranks: int, packed: int) -> None:
    """Equal sizes on all ranks; each value is on one rank, and the rest is zero."""
    tensor = torch.arange(1, 1 + full_size * packed)[:, None]
    shards = [even_shard(-2, full_size * packed, rank, num_ranks, packed=packed) for rank in range(num_ranks)]
    parts = [shard.of(tensor) for shard in shards]
    assert len({part.shape for part in parts}) == 1
    assert all(part.shape == shard.local_shape(tensor.shape) for part, shard in zip(parts, shards, strict=True))
    values = sorted(int(value) for part in parts for value in part.flatten() if value)
    assert values == list(range(1, 1 + full_size * packed))
    assert sum(shard.num_read for shard in shards) == full_size * packed


@settings(deadline=None)
@given(num_kv_heads=st.integers(1, 8), full_group=st.integers(1, 8), num_ranks=st.integers(1, 9))
def test_every_query_head_meets_its_kv_head_once(num_kv_heads: int, full_group: int, num_ranks: int) -> None:
    """A kernel gives query head i the KV head i // group; on every rank that is the model's own."""
    num_q_heads = num_kv_heads * full_group
    split = HeadSplit.of(num_q_heads, num_kv_heads, num_ranks)
    queries, keys = torch.arange(1, 1 + num_q_heads), torch.arange(1, 1 + num_kv_heads)
    seen = []
    for rank in range(num_ranks):
        own_queries = split.q_shard(-1, num_q_heads, rank).of(queries)
        own_keys = split.kv_shard(-1, num_kv_heads, rank).of(keys)
        assert (len(own_queries), len(own_keys)) == (split.q_heads, split.kv_heads)
        for index, query in enumerate(own_queries.tolist()):
            if query:
                assert (query - 1) // full_group == own_keys[index // split.group] - 1
                seen.append(query)
    assert sorted(seen) == list(range(1, 1 + num_q_heads))
    assert split.padded_q_heads == split.q_heads * num_ranks - num_q_heads


@settings(deadline=None)
@given(
    heads=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    head_dim=st.sampled_from([8, 24, 64]),
    num_ranks=st.integers(1, 6),
    group=st.sampled_from([1, 16, 32, 128]),
)
def test_all_ranks_have_groups_of_one_size(heads: tuple[int, int], head_dim: int, num_ranks: int, group: int) -> None:
    """Also where some ranks have heads of zeros, or fewer: no bound of any rank lies within a group."""
    num_kv_heads, full_group = heads
    split = HeadSplit.of(num_kv_heads * full_group, num_kv_heads, num_ranks)
    q_size, kv_size = split.num_q_heads * head_dim, num_kv_heads * head_dim
    ranks = range(num_ranks)
    for shards in (
        [split.q_shard(-1, q_size, rank) for rank in ranks],
        [split.kv_shard(-1, kv_size, rank) for rank in ranks],
        [even_shard(-1, q_size, rank, num_ranks) for rank in ranks],
        [even_shard(-1, 3 * kv_size, rank, num_ranks, packed=3) for rank in ranks],
    ):
        (unit,) = {shard.unit(group) for shard in shards}
        assert all(bound % unit == 0 for shard in shards for part in shard.parts for bound in part)
        assert {shard.in_units(unit, -1).unit(group // unit) for shard in shards} == {1}


@pytest.mark.parametrize(
    ("heads", "num_ranks", "expected"),
    [
        ((32, 8), 4, (8, 2, 0, 1)),  # all divides
        ((32, 8), 16, (2, 1, 0, 2)),  # each KV head on two ranks
        ((9, 3), 3, (3, 1, 0, 1)),
        ((9, 3), 2, (6, 2, 3, 1)),  # a group of zeros
        ((8, 1), 3, (3, 1, 1, 3)),
    ],
)
def test_splits_of_known_shapes(heads: tuple[int, int], num_ranks: int, expected: tuple[int, ...]) -> None:
    split = HeadSplit.of(*heads, num_ranks)
    assert (split.q_heads, split.kv_heads, split.padded_q_heads, split.kv_copies) == expected
