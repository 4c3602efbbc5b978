"""Tests that a shape becomes a config in a new folder, and that any other name stays a model's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.errors import ModelError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.speculative.heads.head_config import eagle3_config
from piecegraph.tools.command_line.shapes import HEAD_TOKENS, SHAPES, head_folder, model_folder


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_becomes_a_folder_that_transformers_reads(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = model_folder(f"shape:{name}", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    assert config.hidden_size == json.loads(Path(folder, "config.json").read_text())["hidden_size"]


def test_a_shape_can_have_fewer_layers(tmp_path: Path) -> None:
    """It gets a folder of its own, so that both can be made."""
    folder, whole = (model_folder(f"shape:qwen3-30b-a3b{layers}", tmp_path) for layers in (":8", ""))
    configs = [json.loads(Path(each, "config.json").read_text()) for each in (folder, whole)]
    assert [config["num_hidden_layers"] for config in configs] == [8, 48]


@pytest.mark.parametrize("layers", ["", "0", "-1", "all"])
def test_layers_that_are_no_number_are_refused(layers: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"asks for '{layers}' layers; give a number, such as shape:llama-8b:8"):
        model_folder(f"shape:llama-8b:{layers}", tmp_path)


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no shape 'llama-9b'. Did you mean 'llama-8b'\?"):
        model_folder("shape:llama-9b", tmp_path)


def test_a_model_is_left_as_it_is(tmp_path: Path) -> None:
    assert model_folder("org/model", tmp_path) == head_folder("org/model", tmp_path) == "org/model"


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_a_head(name: str, tmp_path: Path) -> None:
    """It fits the shape, with three of its hidden states and the vocabulary of published heads."""
    from transformers import AutoConfig

    source = ModelSource(model=head_folder(f"shape:{name}", tmp_path), load_format="dummy")
    model = AutoConfig.from_pretrained(model_folder(f"shape:{name}", tmp_path))
    head = eagle3_config(source, model)
    assert len(head.hidden_states) == 3 and head.draft_vocab_size == HEAD_TOKENS
    assert head.layer_config.num_hidden_layers == 1 and head.layer_config.head_dim == model.head_dim
