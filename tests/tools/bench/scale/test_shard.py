from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.scale.shard import shard_config, shard_folder
from tests.runner.tiny_models import FAMILIES, llama_config


def test_a_share_has_divided_sizes_and_the_hidden_size_of_the_whole(tmp_path: Path) -> None:
    config = llama_config(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, intermediate_size=96)
    written = json.loads((shard_folder(config, 4, tmp_path) / "config.json").read_text())
    assert (written["num_attention_heads"], written["num_key_value_heads"]) == (2, 1)
    assert (written["intermediate_size"], written["vocab_size"]) == (24, config.vocab_size // 4)
    assert (written["hidden_size"], written["num_hidden_layers"]) == (64, config.num_hidden_layers)
    assert written["head_dim"] == config.head_dim
    assert config.num_attention_heads == 8, "the whole is as it was"


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="intermediate_size=50 does not divide by 4 ranks"):
        shard_config(llama_config(intermediate_size=50), 4)


def test_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="its layers have experts"):
        shard_config(FAMILIES["qwen3-moe"](), 2)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Lfm2Config", "layers that keep a state"),
        ("BambaConfig", "layers that keep a state"),
        ("Mamba2Config", "model without attention heads"),
        ("MiniCPM3Config", "latent attention"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor parallelism divides no {what}"):
        shard_config(getattr(transformers, name)(), 2)
