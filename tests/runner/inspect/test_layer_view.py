"""What a layer launches, read off graphs that nobody runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph.config import CompileConfig
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.inspect.layer_view import LayerView
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


def test_ops_of_a_pass_are_counted(folder: Path) -> None:
    """One matmul for q, k and v, one for gate and up. Taking a part of its result computes nothing."""
    merged, plain = layer_of(folder, "merge-projections"), layer_of(folder)
    assert merged.matmuls == 4
    assert merged.left_to_inductor == plain.left_to_inductor


def test_launches_of_an_unlisted_backend_are_not_known(folder: Path) -> None:
    layer = layer_of(folder, backend="sdpa")
    assert layer.split_ops == {"piecegraph::attention": None}
    assert layer.launches == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: no H200 is assumed")
@pytest.mark.parametrize(("inner", "launches"), [(14336, 7), (18944, 8)])
def test_an_activation_is_a_kernel_where_the_library_runs_its_linear(inner: int, launches: int, tmp_path: Path) -> None:
    """On an H200: programs of the second would have a last wave of a few."""
    llama_config(
        num_hidden_layers=3, hidden_size=4096, intermediate_size=inner, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, dtype="bfloat16",
    ).save_pretrained(str(tmp_path))  # fmt: skip
    config = EngineConfig(source=ModelSource(model=str(tmp_path)), attention_backend="triton", max_model_len=64)
    layer = explain(config, assume_gpu=True).layer
    assert layer is not None and layer.launches == launches
