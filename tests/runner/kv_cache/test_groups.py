"""Layers are grouped by their sliding windows if that saves memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.runner.attention.interface.cache_spec import Reach
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.kv_cache.groups import MAX_GROUPS, KVCacheLayout, kv_cache_layout

LAYER = AttentionLayer(
    name="", num_q_heads=8, num_kv_heads=4, key_dim=64, value_dim=64, dtype=torch.bfloat16, scale=1.0, window=0,
    softcap=0.0, has_sinks=False,
)  # fmt: skip


def layers(windows: Sequence[int]) -> list[AttentionLayer]:
    return [replace(LAYER, name=f"layers.{number}", window=window) for number, window in enumerate(windows)]


def layout(windows: Sequence[int], max_model_len: int = 32768, block_size: int = 16) -> KVCacheLayout:
    return kv_cache_layout(layers(windows), max_model_len=max_model_len, block_size=block_size)


def every(period: int, num_layers: int, window: int) -> list[int]:
    """Full attention in every so many layers, windows in all others."""
    return [0 if number % period == period - 1 else window for number in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        (every(6, 26, 512), [4, 4, 4, 4, 4, 2, 4]),  # Gemma-3 1B
        (every(6, 48, 1024), [8] * 6),  # Gemma-3 12B
        (every(6, 62, 1024), [10, 10, 10, 10, 10, 2, 10]),  # Gemma-3 27B
        (every(2, 24, 128), [12, 12]),  # gpt-oss 20B
        (every(4, 32, 4096), [8, 8, 8, 8]),  # Command R7B
        ([0] * 13 + [1024] * 11, [13, 11]),  # two places stay empty, where little is kept
        ([0] * 11 + [1024] * 13, [11, 11, 2]),  # where everything is kept none may
        ([0, 8, 16] * 3, [3, 3, 3]),
    ],
)
def test_kinds_are_split_into_groups_of_one_size(windows: list[int], sizes: list[int]) -> None:
    assert [len(group.layers) for group in layout(windows).groups] == sizes


def test_gemma_2_and_the_memory_it_saves() -> None:
    found = layout(every(2, 42, 4096), max_model_len=8192)
    assert [group.sliding_window for group in found.groups] == [4096, None]
    assert found.groups[0].layers == tuple(range(0, 42, 2))
    assert found.reaches == (frozenset({Reach(4096)}), frozenset({Reach()}))
    assert found.tensors[1] == ("layers.2", "layers.3")
    assert found.notes == (
        "kv cache groups: 21 x window of 4096 tokens, 21 x full attention: 2 groups of up to 21 layers; while it "
        "decodes, a request of 8192 tokens takes 75% of the memory that one group would",
    )


def test_one_kind_of_layers_is_one_group() -> None:
    """One group costs the scheduler nothing more; with a window, blocks outside it are still freed."""
    full, sliding = layout([0] * 4), layout([4096] * 4)
    for found in (full, sliding):
        assert [group.layers for group in found.groups] == [(0, 1, 2, 3)]
        assert found.tensors == tuple((f"layers.{number}",) for number in range(4))
    assert (full.groups[0].sliding_window, full.notes) == (None, ())
    assert sliding.groups[0].sliding_window == 4096
    assert sliding.note == "4 x window of 4096 tokens: one group"


def test_a_window_that_no_request_exceeds_counts_as_none() -> None:
    found = layout(every(2, 24, 128), max_model_len=128)
    assert len(found.groups) == 1
    assert (found.groups[0].sliding_window, found.note) == (None, None)
    assert len(layout(every(2, 24, 128), max_model_len=512).groups) == 2


def test_groups_that_save_little_are_not_made() -> None:
    found = layout(every(2, 24, 4000), max_model_len=4096)
    assert [group.sliding_window for group in found.groups] == [None]
    assert found.reaches == (frozenset({Reach(), Reach(4000)}),)
    assert found.note is not None and "several would save less than 10%" in found.note
    near = layout([1000, 1008] * 4)
    assert [group.sliding_window for group in near.groups] == [1008]


@pytest.mark.parametrize("change", [{"key_dim": 128}, {"num_kv_heads": 2}, {"dtype": torch.float32}])
def test_layers_whose_blocks_differ_are_one_group(change: dict[str, object]) -> None:
    """The group keeps what its layer with the largest window needs."""
    kinds = [(layer if layer.window else replace(layer, **change)) for layer in layers(every(2, 6, 512))]  # type: ignore[arg-type]
    found = kv_cache_layout(kinds, max_model_len=8192, block_size=16)
    assert [group.sliding_window for group in found.groups] == [None]
    assert found.note is not None and "one group, which keeps everything, since layers whose" in found.note
    windows = [replace(layer, window=layer.window or 64) for layer in kinds]
    assert kv_cache_layout(windows, max_model_len=8192, block_size=16).groups[0].sliding_window == 512


def test_blocks_of_a_request_are_those_of_all_groups() -> None:
    found = layout([8, 0, 8], max_model_len=96, block_size=4)
    assert len(found.groups) == 3
    assert found.blocks_per_request(96, 4, max_step_tokens=1) == 24 + 2 * 3
    assert found.blocks_per_request(96, 4, max_step_tokens=96) == 3 * 24


@given(
    windows=st.lists(st.sampled_from([0, 16, 64, 500]), min_size=1, max_size=40),
    max_model_len=st.integers(2, 5000),
    block_size=st.sampled_from([1, 16, 24, 64]),
)
def test_every_set_of_layers_has_a_valid_layout(windows: list[int], max_model_len: int, block_size: int) -> None:
    """Every layer is in one group, which keeps all that it sees, and shares its tensor with no layer of its group."""
    found = layout(windows, max_model_len, block_size)
    assert len(found.groups) <= max(MAX_GROUPS, len(set(windows)))
    assert sorted(chain.from_iterable(group.layers for group in found.groups)) == list(range(len(windows)))
    for number, window in enumerate(windows):
        group = found.groups[found.group_of[f"layers.{number}"]]
        assert number in group.layers
        assert group.sliding_window is None or 0 < window <= group.sliding_window
    names = list(chain.from_iterable(found.tensors))
    assert sorted(names) == sorted(found.group_of)
    for shared in found.tensors:
        assert len({found.group_of[name] for name in shared}) == len(shared)
    whole = -(-max_model_len // block_size) * len(windows)
    assert len(found.tensors) * found.blocks_per_request(max_model_len, block_size, 1) <= whole
