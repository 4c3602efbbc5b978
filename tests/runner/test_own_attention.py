"""Models that compute attention in modules of their own answer as in transformers once these call our op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph.compiler.tracing.trace import trace
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.load import load_config, load_model
from tests.runner.architectures import save_tiny, tiny_config, tiny_model
from tests.runner.test_hybrid_models import check, generate, load_hybrid, manager
from tests.runner.traced_once import is_shareable

MODELS = ("gptj", "codegen", "gpt_neo")
ALWAYS = ("codegen", "gpt_neo")
"""The others are slow tests."""
CPU = torch.device("cpu")

models = pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)


@models
def test_a_model_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    """In chunks, preempted, and again with what the prefix cache kept. All blocks are free in the end."""
    model = tiny_model(name)
    with load_hybrid(
        save_tiny(name, model, tmp_path), max_model_len=40, num_kv_blocks=21 if name == "gpt_neo" else 13
    ) as llm:
        for _ in range(2):
            check(model, generate(llm))
        stats = llm.engine.stats
        assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
        assert manager(llm).num_free_blocks == manager(llm).num_blocks


@models
def test_all_that_a_trace_depends_on_is_known(name: str, tmp_path: Path) -> None:
    """So that the cache may keep it. No mask is left in it."""
    source = ModelSource(model=str(save_tiny(name, tiny_model(name), tmp_path)))
    loaded = load_model(source, load_config(source), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        traced = trace(CausalLMForward(loaded.model), example_inputs(CPU), {}, DYNAMIC_DIMS)
    assert is_shareable(traced)
    targets = [str(node.target) for node in traced.graph_module.graph.nodes]
    assert sum("piecegraph" in target for target in targets) == 2
    assert not any("softmax" in target or "tril" in target for target in targets)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_inductor_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    with load_hybrid(save_tiny(name, model, tmp_path), compiler="inductor", num_kv_blocks=60) as llm:
        check(model, generate(llm))


def test_modules_of_an_unknown_kind_are_refused_before_weights_are_read() -> None:
    with pytest.raises(UnsupportedModel, match="XGLMForCausalLM computes its attention itself .* not known here"):
        load_model(ModelSource(model="./nowhere"), tiny_config("xglm"), dtype=torch.float32, device=CPU)


def test_ranks_do_not_divide_such_a_model() -> None:
    with pytest.raises(UnsupportedModel, match="tensor parallelism does not divide; use tensor_parallel_size=1"):
        load_model(ModelSource(model="./nowhere"), tiny_config("gptj"), dtype=torch.float32, device=CPU, num_ranks=2)
