"""What a step reads, of models as they are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph import LLM
from piecegraph.tools.bench.latency import model_size
from tests.runner.tiny_models import FAMILIES, llama_config, random_model, save


def opened(folder: Path) -> LLM:
    return LLM(folder, device="cpu", compiler="eager", num_kv_blocks=8, skip_tokenizer_init=True, dtype="float32")


def test_routed_experts_are_told_from_what_every_token_takes(tmp_path: Path) -> None:
    config = FAMILIES["qwen3-moe"]()
    with opened(save(random_model(config), tmp_path)) as llm:
        size = model_size(llm)
    experts = size.experts
    assert experts is not None
    a_matrix = config.hidden_size * config.moe_intermediate_size
    assert experts.params == config.num_hidden_layers * config.num_experts * 3 * a_matrix
    assert experts.num_bytes == 4 * experts.params
    assert (experts.num_experts, experts.top_k) == (config.num_experts, config.num_experts_per_tok)
    assert size.bytes_read(1) < size.bytes_read(2) < size.weight_bytes
    assert size.bytes_read(1000) == pytest.approx(size.weight_bytes)


def test_a_model_without_routes_reads_all_of_it(tmp_path: Path) -> None:
    with opened(save(random_model(llama_config()), tmp_path)) as llm:
        size = model_size(llm)
    assert size.experts is None
    assert size.bytes_read(1) == size.weight_bytes
    assert size.params_a_token == size.matmul_params - size.logits_params
