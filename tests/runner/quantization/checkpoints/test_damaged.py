"""Damaged checkpoints of every format are refused by name before weights are read, or their weights are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.quantization.checkpoints.damaged import NAMES, check


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_damages_are_refused_by_name_or_change_nothing(name: str, tmp_path: Path) -> None:
    """Missing, renamed and cast tensors, other shapes, scales, orders and configs, and truncated files."""
    found = set()
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found.add(check(name, seed, folder).partition(":")[0])
    assert "refused" in found
