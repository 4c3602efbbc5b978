"""A shape is a config made on the spot; whatever is no shape is a model as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.errors import ModelError
from piecegraph.tools.bench.shapes import SHAPES, model_folder


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_becomes_a_folder_that_transformers_reads(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = model_folder(f"shape:{name}", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    assert config.hidden_size == json.loads(Path(folder, "config.json").read_text())["hidden_size"]


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no shape 'llama-9b'. Did you mean 'llama-8b'\?"):
        model_folder("shape:llama-9b", tmp_path)


def test_a_model_is_left_as_it_is(tmp_path: Path) -> None:
    assert model_folder("org/model", tmp_path) == "org/model"
