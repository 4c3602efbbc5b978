"""Models whose layers attend within chunks: a chunk is kept and nothing before it, and no token shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.test_hybrid_models import GREEDY, PROMPTS, check, generate, load_hybrid, manager
from tests.runner.test_sliding_windows import load_windowed, poison
from tests.runner.tiny_models import CHUNKED, make_model, save


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = make_model("llama4")
    return model, save(model, tmp_path_factory.mktemp("llama4"))


@pytest.mark.parametrize("name", CHUNKED)
def test_a_model_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    """In steps of 5 tokens, preempted, and again with what the prefix cache kept. All blocks are free in the end."""
    model = make_model(name)
    with load_hybrid(save(model, tmp_path), num_kv_blocks=32) as llm:
        for _ in range(2):
            check(model, generate(llm))
        stats = llm.engine.stats
        assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
        assert manager(llm).num_free_blocks == manager(llm).num_blocks
        assert {group.chunk_size for group in manager(llm).groups} == {None, model.config.attention_chunk_size}


@pytest.mark.parametrize("options", [{"attention_backend": "triton"}, {"attention_backend": "sdpa"}], ids=str)
def test_graphs_read_nothing_before_a_chunk(llama4: tuple[PreTrainedModel, Path], options: dict[str, Any]) -> None:
    """Uniform decode batches run whole where lengths are read in the graph; free blocks hold NaN before each step."""
    model, folder = llama4
    with load_windowed(folder, enable_prefix_caching=False, num_kv_blocks=100, **options) as llm:
        engine, pool = llm.engine, manager(llm).pool
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY, is_final_only=True)
        tokens, num_passed = {}, 0
        while engine.has_unfinished:
            poison(llm, [block for block in range(pool.num_blocks) if pool.is_free(block)])
            tokens.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
            num_passed = max([num_passed, *(sum(one.num_passed) for one in manager(llm)._holdings.values())])
        assert num_passed > 10 and not llm.runner.graphs.failed()
        ran = llm.runner.counters.by_mode()
        assert (ran.get(CUDAGraphMode.FULL, 0) > 0) is (options["attention_backend"] == "triton")
    check(model, [tokens[str(i)] for i in range(len(PROMPTS))])


def test_prompt_embeddings_know_their_positions(llama4: tuple[PreTrainedModel, Path]) -> None:
    """The last layer scales queries by position; the model's own code would take a row's number for it."""
    model, folder = llama4
    prompts = PROMPTS[2:4]
    embedding: Any = model.get_input_embeddings()
    embeds = [embedding.weight[torch.tensor(prompt)].detach() for prompt in prompts]
    with load_hybrid(folder, enable_prompt_embeds=True, num_kv_blocks=60) as llm:
        outputs = llm.generate([{"prompt_embeds": each} for each in embeds], GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
def test_explain_shows_chunks_and_what_they_need(llama4: tuple[PreTrainedModel, Path]) -> None:
    _, folder = llama4
    source = ModelSource(model=str(folder))
    explained = explain(EngineConfig(source=source, max_model_len=64, block_size=4), assume_gpu=True)
    assert sorted(row.chunk_size for row in explained.attention) == [0, 8]
    assert explained.backend == "sdpa" and "attends within chunks of 8 tokens" in explained.backend_reasons[0]
    assert any(note.startswith("kv cache groups: 3 x chunks of 8 tokens, 1 x full") for note in explained.notes)
    short = explain(EngineConfig(source=source, max_model_len=8), assume_gpu=True)
    assert short.backend == "triton" and {row.chunk_size for row in short.attention} == {0}


def test_a_model_with_chunks_does_not_pool(llama4: tuple[PreTrainedModel, Path]) -> None:
    """Pooling has no chunks; it would let tokens see the whole text."""
    _, folder = llama4
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn attends within chunks"):
        LLM(folder, runner="pooling", device="cpu", compiler="eager", skip_tokenizer_init=True)


@pytest.mark.slow
def test_inductor_gives_the_same_tokens(llama4: tuple[PreTrainedModel, Path]) -> None:
    model, folder = llama4
    with load_hybrid(folder, compiler="inductor", num_kv_blocks=60) as llm:
        check(model, generate(llm))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHUNKED)
def test_a_gpu_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    """By torch's attention, between graphs."""
    model = make_model(name)
    with load_windowed(save(model, tmp_path), device="cuda", attention_backend="auto") as llm:
        for _ in range(2):
            check(model, generate(llm))
