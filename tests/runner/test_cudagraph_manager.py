"""What a start runs before each graph: every kind of attention layer, once, however many layers there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piecegraph.compiler.graphs.graphs import CapturedGraph
from piecegraph.compiler.graphs.known_blocks import Copied
from piecegraph.runner.attention.triton_backend import TritonImpl
from tests.runner.test_graphs import SIZES, load
from tests.runner.tiny_models import WINDOW, make_config, random_model, save


def attended_by_bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Counter[int]]:
    """Calls of attention by the layer's window, bucket by bucket: PIECEWISE from the largest on, then FULL."""
    counts: list[Counter[int]] = [Counter()]
    forward, init = TritonImpl.forward, CapturedGraph.__init__

    def counted_forward(self: TritonImpl, *args: Any, window: int, **kwargs: Any) -> None:
        counts[-1][window] += 1
        forward(self, *args, window=window, **kwargs)

    def captured(self: CapturedGraph, **kwargs: Any) -> None:
        counts.append(Counter())
        init(self, **kwargs)

    monkeypatch.setattr(TritonImpl, "forward", counted_forward)
    monkeypatch.setattr(CapturedGraph, "__init__", captured)
    load(folder).close()
    return counts


@pytest.mark.parametrize("num_layers", [2, 5])
def test_equal_layers_are_warmed_up_by_one(num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them run when a bucket is recorded, and once more ahead of the first of each mode."""
    config = make_config("Qwen3Config", head_dim=16, num_hidden_layers=num_layers)
    counts = attended_by_bucket(save(random_model(config), tmp_path), monkeypatch)
    num_piecewise = len(SIZES)
    firsts = [counts[0], counts[num_piecewise]]
    later = [*counts[1:num_piecewise], *counts[num_piecewise + 1 : -1]]
    assert firsts == [Counter({0: 2 * num_layers + 1})] * 2
    assert later == [Counter({0: num_layers + 1})] * len(later)


def test_sliding_and_full_layers_are_of_two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        "Gemma3TextConfig",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )
    counts = attended_by_bucket(save(random_model(config), tmp_path), monkeypatch)
    assert counts[1] == counts[-2] == Counter({WINDOW: 3 + 1, 0: 3 + 1})


def test_why_layers_all_ran_is_told_by_reason(tmp_path: Path) -> None:
    """With how many graphs it holds for; not for one that has copies."""
    with load(save(random_model(make_config("Qwen3Config", head_dim=16)), tmp_path)) as llm:
        manager = llm.runner.graphs
        assert manager.not_copied() == {}  # on a CPU there are no nodes
        (mode, graphs), *_ = manager.graphs.items()
        for descriptor, told in zip(graphs.descriptors, ((0, "few"), (0, "few"), (3, None)), strict=False):
            replayed = graphs._find(descriptor)
            replayed.graph = replace(replayed.graph, copied=(Copied(told[0], 5, told[1]),))
        assert manager.not_copied() == {"few": 2}
        assert manager.summary()[mode.value]["with_copies"] == 1
