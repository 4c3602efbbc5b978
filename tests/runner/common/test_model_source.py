from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.errors import ConfigError
from piecegraph.runner.common.model_source import ModelSource


def test_load_formats() -> None:
    with pytest.raises(ConfigError, match=r"load_format='safetensor' is unknown\. Did you mean 'safetensors'"):
        ModelSource(model="x", load_format="safetensor")
    with pytest.raises(ConfigError, match=r"load_format='gguf', but 'x' is not a \.gguf file"):
        ModelSource(model="x", load_format="gguf")


def test_random_weights_are_in_no_file(llama_dir: Path) -> None:
    assert ModelSource(model=str(llama_dir)).weight_files == (llama_dir / "model.safetensors",)
    assert ModelSource(model=str(llama_dir), load_format="dummy").weight_files == ()
