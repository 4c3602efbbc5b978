"""A start warms up every kind of attention layer once before each graph, however many layers there are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from piecegraph.compiler.graphs.graphs import CapturedGraph
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.backend import TritonImpl
from tests.runner.test_graphs import SIZES, load
from tests.runner.tiny_models import WINDOW, make_config, random_model, save


def attended_by_bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Counter[int]]:
    """Calls of attention by the layer's window, bucket by bucket: PIECEWISE from the largest on, then FULL."""
    counts: list[Counter[int]] = [Counter()]
    forward, init = TritonImpl.forward, CapturedGraph.__init__

    def counted_forward(self: TritonImpl, call: AttentionCall, *args: Any) -> None:
        counts[-1][call.window] += 1
        forward(self, call, *args)

    def captured(self: CapturedGraph, **kwargs: Any) -> None:
        counts.append(Counter())
        init(self, **kwargs)

    monkeypatch.setattr(TritonImpl, "forward", counted_forward)
    monkeypatch.setattr(CapturedGraph, "__init__", captured)
    load(folder).close()
    return counts


@pytest.mark.parametrize("num_layers", [2, 5])
def test_equal_layers_are_warmed_up_by_one(num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds run when a bucket is captured, and once more before the first bucket of each mode."""
    config = make_config("Qwen3Config", head_dim=16, num_hidden_layers=num_layers)
    counts = attended_by_bucket(save(random_model(config), tmp_path), monkeypatch)
    num_piecewise = len(SIZES)
    firsts = [counts[0], counts[num_piecewise]]
    later = [*counts[1:num_piecewise], *counts[num_piecewise + 1 : -1]]
    assert firsts == [Counter({0: 2 * num_layers + 1})] * 2
    assert later == [Counter({0: num_layers + 1})] * len(later)


@pytest.mark.slow
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
