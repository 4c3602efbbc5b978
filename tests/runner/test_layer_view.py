"""What a layer launches, read off graphs that nobody runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.config import CompileConfig
from piecegraph.runner.engine_config import EngineConfig
from piecegraph.runner.explanation import explain
from piecegraph.runner.layer_view import LayerView
from piecegraph.runner.model_source import ModelSource
from tests.runner.tiny_models import llama_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama_config(num_hidden_layers=5).save_pretrained(str(folder))
    return folder


def layer_of(folder: Path, *passes: str, backend: str = "triton") -> LayerView:
    config = EngineConfig(
        source=ModelSource(model=str(folder)),
        device="cpu",
        attention_backend=backend,
        compile=CompileConfig(passes=passes),
    )
    layer = explain(config).layer
    assert layer is not None
    return layer


def test_a_layer_is_one_attention_call_and_the_piece_before_it(folder: Path) -> None:
    """Of Llama without passes: q, k, v, o, gate, up and down, and an attention of one launch."""
    layer = layer_of(folder)
    assert layer.unique_pieces == (1,)
    assert (layer.ours, layer.matmuls, layer.split_ops) == ({}, 7, {"piecegraph::attention": 1})
    assert layer.launches == 8


def test_a_pass_shows_in_it(folder: Path) -> None:
    """One matmul for q, k and v, one for gate and up. Taking a part of its result computes nothing."""
    merged, plain = layer_of(folder, "merge-projections"), layer_of(folder)
    assert merged.matmuls == 4
    assert merged.left_to_inductor == plain.left_to_inductor


def test_launches_of_a_backend_that_tells_none_are_not_known(folder: Path) -> None:
    layer = layer_of(folder, backend="sdpa")
    assert layer.split_ops == {"piecegraph::attention": None}
    assert layer.launches == 7
