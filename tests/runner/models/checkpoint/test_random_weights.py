"""Random weights are those of one process, however a model is divided, and no rank holds the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.checkpoint import construct
from piecegraph.runner.models.checkpoint.random_weights import NotInitialized, fill_with_random
from piecegraph.runner.models.load import load_model
from piecegraph.runner.tensor_parallel.plan import rank_plan
from piecegraph.runner.tensor_parallel.sharded_modules import shard_model
from tests.runner.tiny_models import FAMILIES, HYBRIDS, LATENT, UNLISTED

CONFIGS = {**FAMILIES, **HYBRIDS, **LATENT, **UNLISTED}
CPU = torch.device("cpu")


def from_config(name: str, device: str) -> Any:
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)


def filled(name: str, seed: int = 0) -> Any:
    model = from_config(name, "meta")
    with torch.random.fork_rng(devices=[]):
        fill_with_random(model, from_config(name, "meta"), {}, CPU, seed)
    return model


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe", "gpt2", "gpt-oss", "deepseek-v3", "mamba2", "zamba2"])
def test_every_parameter_and_buffer_has_values_as_transformers_draws_them(name: str) -> None:
    model, drawn = filled(name), from_config(name, "cpu")
    expected = dict(drawn.named_parameters())
    assert [each for each, _ in model.named_parameters()] == list(expected)  # tied ones once
    for path, value in model.named_parameters():
        other = expected[path]
        assert (value.shape, value.dtype, value.device) == (other.shape, other.dtype, CPU)
        assert bool(value.isfinite().all())
        if value.numel() > 1000:
            assert abs(float(value.std() - other.detach().std())) < 0.1 * float(other.detach().std()) + 1e-6, path
    for (path, value), (_, other) in zip(model.named_buffers(), drawn.named_buffers(), strict=True):
        assert torch.equal(value, other), path


def test_layers_and_seeds_differ_and_the_same_seed_gives_the_same() -> None:
    one, same, other = filled("llama"), filled("llama"), filled("llama", seed=1)
    layers = [layer.self_attn.q_proj.weight for layer in one.model.layers]
    assert not torch.equal(layers[0], layers[1])
    assert torch.equal(layers[0], same.model.layers[0].self_attn.q_proj.weight)
    assert not torch.equal(layers[0], other.model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2"])
def test_a_rank_has_its_part_of_what_one_process_has(name: str) -> None:
    whole = dict(filled(name).named_parameters(remove_duplicate=False))
    for rank in range(2):
        model = from_config(name, "meta")
        plan = rank_plan(model, rank, 2)
        shard_model(model, plan)
        with torch.random.fork_rng(devices=[]):
            fill_with_random(model, from_config(name, "meta"), plan.shards, CPU, 0)
        assert plan.shards
        for path, value in model.named_parameters():
            shard = plan.shards.get(path)
            assert torch.equal(value, whole[path] if shard is None else shard.of(whole[path])), path
        assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))


def test_values_that_transformers_does_not_give_are_named() -> None:
    with pytest.raises(NotInitialized, match="model.layers.0.mamba.mup_vector"):
        filled("falcon-h1")


def test_a_divided_model_that_is_drawn_whole_has_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise NotInitialized("model.scale")

    monkeypatch.setattr(construct, "fill_with_random", fail)
    config = CONFIGS["llama"]()
    config.save_pretrained(str(tmp_path))
    source = ModelSource(model=str(tmp_path), load_format="dummy")
    for num_ranks in (1, 2):
        loaded = load_model(source, config, dtype=torch.float32, device=CPU, num_ranks=num_ranks)
        assert any("because transformers gives model.scale no values" in note for note in loaded.notes) == (
            num_ranks > 1
        )
