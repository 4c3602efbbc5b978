"""The tokenizer is the model's or another's, and a model without one is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.errors import ModelError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.tokenizer import load_tokenizer
from tests.runner.tiny_models import llama_config, random_model, save


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    save(random_model(llama_config()), tmp_path)
    with pytest.raises(ModelError, match=r"no usable tokenizer .*tokenizer=.*skip_tokenizer_init=True"):
        load_tokenizer(ModelSource(model=str(tmp_path)))


def test_the_tokenizer_may_come_from_elsewhere(llama_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelSource(model=str(tmp_path)), str(llama_dir))
    assert len(tokenizer) == 261
