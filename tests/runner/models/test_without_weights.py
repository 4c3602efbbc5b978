"""A model without weights is like the one with them, and takes no memory. (Its key is compared in
tests/tools/cache/entries/test_model_key.py, over every family.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from piecegraph import CompileConfig, compile
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.errors import ModelNotFound
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.models.without_weights import load_without_weights
from tests.runner.tiny_models import FAMILIES, MAX_LEN, llama_config, random_model, save


def loaded(folder: Path, family: str = "llama", **options: object) -> LoadedModel:
    """From a folder that has a config and nothing else."""
    config = llama_config(**options) if options else FAMILIES[family]()
    config.save_pretrained(str(folder))
    return load_without_weights(EngineConfig(source=ModelSource(model=str(folder)), dtype="bfloat16", device="cpu"))


def test_every_tensor_is_a_fake_one_on_the_device(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    tensors = [*found.model.parameters(), *found.model.buffers()]
    assert tensors
    assert all(isinstance(each, FakeTensor) and each.device == torch.device("cpu") for each in tensors)
    assert {each.dtype for each in found.model.parameters()} == {torch.bfloat16}
    assert not any(each.requires_grad for each in found.model.parameters())
    assert (found.dtype, found.device) == (torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("is_tied", [True, False])
def test_shared_tensors_stay_shared(tmp_path: Path, is_tied: bool) -> None:
    model = loaded(tmp_path, tie_word_embeddings=is_tied).model
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embeddings.weight is head.weight) is is_tied


def test_no_memory_is_allocated_for_weights(tmp_path: Path) -> None:
    """The weights would need more memory than any machine has."""
    sizes: dict[str, Any] = {
        "hidden_size": 1 << 20,
        "intermediate_size": 1 << 22,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
    }
    model = loaded(tmp_path, **sizes).model
    assert sum(each.numel() for each in model.parameters()) > 1 << 45


@pytest.mark.parametrize("family", [pytest.param("gemma3", marks=pytest.mark.slow), "phi3-longrope-long", "qwen3-moe"])
def test_its_trace_equals_the_trace_with_weights(tmp_path: Path, family: str) -> None:
    """Pieces, matches of passes and all."""
    real = random_model(FAMILIES[family]())
    save(real, tmp_path)
    config = EngineConfig(source=ModelSource(model=str(tmp_path)), dtype="float32", device="cpu")
    cpu = torch.device("cpu")
    read = load_model(config.source, load_config(config.source), dtype=torch.float32, device=cpu).model
    fix_longrope(read, MAX_LEN)
    left, right = (compiled(model) for model in (read, load_without_weights(config).model))
    assert left.source == right.source
    assert left.plan == right.plan
    assert [each.key for each in left.unique_pieces] == [each.key for each in right.unique_pieces]
    for name in ("matches", "misses", "error"):
        assert [getattr(row, name) for row in left.report().passes] == [
            getattr(row, name) for row in right.report().passes
        ]


def compiled(model: nn.Module) -> CompiledModel:
    with torch.no_grad():
        return compile(
            CausalLMForward(model),
            CompileConfig(compiler="eager"),
            dynamic_dims=DYNAMIC_DIMS,
            example_inputs=example_inputs(torch.device("cpu")),
        )


def test_decisions_of_loading_are_in_the_notes(tmp_path: Path) -> None:
    assert "longrope" in " ".join(loaded(tmp_path, "phi3-longrope-long").notes)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_without_weights(EngineConfig(source=ModelSource(model=str(tmp_path / "none"))))
