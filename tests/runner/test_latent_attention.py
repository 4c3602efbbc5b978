"""Models with latent attention: tokens are cached compressed, and no token of an answer shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.tracing.trace import trace
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from tests.runner.test_graphs import load
from tests.runner.test_hybrid_models import GREEDY, PROMPTS, check, generate, load_hybrid, manager
from tests.runner.tiny_models import LATENT, make_config, make_model, save
from tests.runner.traced_once import is_shareable

ALWAYS = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite")
"""The others are slow tests."""
NOTE = (
    "latent attention: in each of 2 layers a token takes 24 numbers, where the keys and values of 4 heads are "
    "112: 21.4%"
)


def load_latent(folder: Path, **options: Any) -> LLM:
    """Chunks of 5 tokens, and too few blocks for all requests."""
    return load_hybrid(folder, **{"num_kv_blocks": 16, **options})


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = make_model("deepseek-v3")
    return model, save(model, tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in LATENT]
)
def test_a_model_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    """In chunks, preempted, and again with what the prefix cache kept. The cache holds latents alone."""
    model = make_model(name)
    with load_latent(save(model, tmp_path)) as llm:
        for _ in range(2):
            check(model, generate(llm))
        stats = llm.engine.stats
        assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
        assert manager(llm).num_free_blocks == manager(llm).num_blocks == 16
        caches = llm.runner.step.kv_caches.values()
        memory = {cache.key.untyped_storage().data_ptr(): cache.key.untyped_storage().nbytes() for cache in caches}
        assert {cache.value.untyped_storage().data_ptr() for cache in caches} == memory.keys()
        assert list(memory.values()) == [16 * 4 * (16 + 8) * 4] * 2
        assert NOTE in llm.notes and "kv cache groups: 2 x latent attention: one group" in llm.notes


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_graphs_give_the_same_tokens(deepseek: tuple[PreTrainedModel, Path], backend: str) -> None:
    """Uniform decode batches run whole where the backend reads lengths in the graph; free blocks hold NaN."""
    model, folder = deepseek
    with load(folder, block_size=4, num_kv_blocks=64, attention_backend=backend) as llm:
        check(model, generate(llm))
        pool, engine = manager(llm).pool, llm.engine
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY, is_final_only=True)
        tokens = {}
        while engine.has_unfinished:
            named = {block for each in manager(llm)._holdings.values() for block in each.tables[0]}
            if not engine.stats.num_running:  # later, free blocks may hold prefixes that a request finds
                for cache in llm.runner.step.kv_caches.values():
                    cache.key[[block for block in range(pool.num_blocks) if block not in named]] = float("nan")
                manager(llm).reset_prefix_cache()
            tokens.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
        check(model, [tokens[str(i)] for i in range(len(PROMPTS))])
        ran = llm.runner.counters.by_mode()
        assert not llm.runner.graphs.failed() and ran[CUDAGraphMode.PIECEWISE] > 0
        assert (ran.get(CUDAGraphMode.FULL, 0) > 0) is (backend == "triton")


def test_explain_shows_what_a_token_takes(deepseek: tuple[PreTrainedModel, Path]) -> None:
    _, folder = deepseek
    explained = explain(EngineConfig(source=ModelSource(model=str(folder)), device="cpu", max_model_len=64))
    assert NOTE in explained.notes and explained.cache_bytes_per_token == 2 * 24 * 4
    (row,) = explained.attention
    assert row.is_latent and (row.num_q_heads, row.num_kv_heads, row.key_dim, row.value_dim) == (4, 1, 24, 16)
    assert explained.report.num_unique_pieces <= 3 + 1  # the dense layer and those with experts differ


def test_a_trace_can_be_kept(deepseek: tuple[PreTrainedModel, Path]) -> None:
    """Everything that a trace reads of the layers can be found by another process."""
    _, folder = deepseek
    source, cpu = ModelSource(model=str(folder)), torch.device("cpu")
    loaded = load_model(source, load_config(source), dtype=torch.float32, device=cpu)
    with torch.no_grad():
        traced = trace(CausalLMForward(loaded.model), example_inputs(cpu), {}, DYNAMIC_DIMS)
    assert not traced.reads.not_comparable and is_shareable(traced)


@pytest.mark.slow
def test_kernels_that_keep_values_apart_are_refused(deepseek: tuple[PreTrainedModel, Path]) -> None:
    """On a GPU torch's attention runs; a backend that was asked for by name says why it cannot."""
    _, folder = deepseek
    config = EngineConfig(source=ModelSource(model=str(folder)), max_model_len=64)
    assert explain(config, assume_gpu=True).backend == "sdpa"
    with pytest.raises(UnsupportedModel, match="keeps latents"):
        explain(replace(config, attention_backend="triton"), assume_gpu=True)


def test_sparse_attention_over_latents_is_refused_by_name(tmp_path: Path) -> None:
    """DeepSeek-V3.2 chooses keys by an indexer."""
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    config = make_config("DeepseekV32Config", num_key_value_heads=4, n_routed_experts=4, n_group=1, **sizes)
    config.architectures = ["DeepseekV32ForCausalLM"]
    config.save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="layers of type (deepseek_sparse|indexed)_attention"):
        load_latent(tmp_path, load_format="dummy")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v2", "glm4-moe-lite"])
def test_inductor_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    with load_latent(save(model, tmp_path), compiler="inductor") as llm:
        check(model, generate(llm))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm4-moe-lite"])
def test_a_gpu_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    """By torch's attention, between graphs."""
    model = make_model(name)
    with load(save(model, tmp_path), device="cuda", block_size=4, num_kv_blocks=64, attention_backend="auto") as llm:
        for _ in range(2):
            check(model, generate(llm))
        assert any("keeps latents" in note for note in llm.notes)
