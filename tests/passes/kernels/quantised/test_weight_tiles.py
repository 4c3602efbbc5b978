"""`WeightLayout`: what it reads from a weight and its scales, and tiles that groups do not cross; stages that fit."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.quantised.weight_tiles import WeightLayout, stages_that_fit
from tests.gpus import A100, H200, RTX_4090
from tests.passes.kernels.quantised.quantised_inputs import e4m3, weights_only


def test_a_layout_is_read_from_the_tensors() -> None:
    found = {
        name: WeightLayout.of(weights.values, weights.scale, weights.block)
        for name, weights in weights_only(70, 192, torch.float32).items()
    }
    assert all((each.num_columns, each.size) == (70, 192) for each in found.values())
    assert [name for name, each in found.items() if each.is_packed] == [name for name in found if "int4" in name]
    assert {name: each.group for name, each in found.items() if each.group} == {
        "int8 in groups": 32, "int4 in groups of 32": 32, "int4 in groups of 64": 64, "e4m3 in blocks": 64,
    }  # fmt: skip
    assert found["e4m3 in blocks"].block_rows == 32
    assert [name for name, each in found.items() if each.has_offset] == ["int8 with offsets", "int4 in groups of 32"]


@pytest.mark.parametrize(
    ("group", "block_k", "groups"), [(0, 128, 1), (32, 128, 4), (128, 128, 1), (96, 32, 1), (48, 16, 1), (24, None, 0)]
)
def test_tiles_and_groups_do_not_cross(group: int, block_k: int | None, groups: int) -> None:
    weights = e4m3(16, 288, block=(1, group))
    layout = WeightLayout.of(weights.values, weights.scale, weights.block)
    assert layout.block_k(128, 16) == block_k
    if block_k is not None:
        assert layout.groups_in(block_k) == groups


def test_stages_are_as_many_as_fit() -> None:
    """The one at work takes memory on Hopper alone; a loop has one stage at least."""
    stage = 48 * 2**10
    found = [stages_that_fit(9, stage, gpu.shared_bytes) for gpu in (RTX_4090, A100, H200)]
    assert found == [3, 4, 4]
    assert stages_that_fit(3, stage, H200.shared_bytes) == 3
    assert stages_that_fit(3, H200.shared_bytes + 1, H200.shared_bytes) == 1
