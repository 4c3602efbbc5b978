"""A rank reads its part of a checkpoint, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from piecegraph.runner.models.common.quiet_transformers import quiet_transformers
from piecegraph.runner.tensor_parallel.sharded_checkpoint import rank_model
from tests.runner.tensor_parallel.test_sharded_modules import cut
from tests.runner.tiny_models import make_model, save


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "qwen3-moe", "phi3", "deepseek-v3"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_read_is_what_would_be_cut(name: str, num_ranks: int, tmp_path: Path) -> None:
    """Also where transformers merges experts that the files have one by one."""
    model = make_model(name)
    files = sorted(save(model, tmp_path).glob("*.safetensors"))
    bytes_read = 0
    for rank in range(num_ranks):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        with quiet_transformers():
            part, info, _, num_bytes = rank_model(type(model), config, files, rank, num_ranks, dtype=torch.float32)
        assert type(part) is type(model) and not any(map(len, info.values()))
        expected = cut(model, rank, num_ranks)
        torch.testing.assert_close(part.state_dict(), expected.state_dict(), rtol=0, atol=0)
        buffers = {name: each for name, each in part.named_buffers() if "first_token" not in name}
        torch.testing.assert_close(
            buffers, {name: dict(expected.named_buffers())[name] for name in buffers}, rtol=0, atol=0
        )
        assert num_bytes <= sum(each.nbytes for each in part.parameters()) + 64
        bytes_read += num_bytes
    whole = sum(each.nbytes for each in model.parameters())
    norms = sum(each.nbytes for name, each in model.named_parameters() if "norm" in name or "kv_a" in name)
    assert bytes_read < whole + (num_ranks - 1) * (2 * whole // 5 + norms), "replicated KV heads and norms at most"


def test_a_tensor_of_another_shape_is_reported(tmp_path: Path) -> None:
    model = make_model("llama")
    files = sorted(save(model, tmp_path).glob("*.safetensors"))
    config = transformers.AutoConfig.from_pretrained(tmp_path, intermediate_size=64)
    with quiet_transformers():
        _, info, _, _ = rank_model(type(model), config, files, 0, 2, dtype=torch.float32)
    names = [name for name, _, _ in info["mismatched_keys"]]
    assert any("mlp.gate_proj" in name for name in names)
