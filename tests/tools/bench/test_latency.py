"""Tests of the bytes that a step reads, for models as they are served."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piecegraph import LLM
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.tools.bench.latency import latency_notes, mean_of_steps, measure_latency, model_size, time_steps
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.floor import RoutedExperts, cache_bytes
from tests.runner.distributed.test_executor import two_ranks
from tests.runner.tiny_models import FAMILIES, llama_config, make_model, random_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

LLM_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "compiler": "eager",
    "num_kv_blocks": 8,
    "skip_tokenizer_init": True,
    "dtype": "float32",
}


def opened(folder: Path) -> LLM:
    return LLM(folder, **LLM_ARGUMENTS)


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


def test_keys_and_values_in_8_bits_are_read_as_they_are_kept(tmp_path: Path) -> None:
    folder = save(random_model(llama_config()), tmp_path)
    with opened(folder) as plain, LLM(folder, **LLM_ARGUMENTS, kv_cache_dtype="fp8") as llm:
        whole, small = model_size(plain).layers, model_size(llm).layers
    assert cache_bytes(small, 1, 10) == cache_bytes(whole, 1, 10) / 4  # of float32


@pytest.mark.slow
def test_quantised_weights_are_read_in_the_bytes_they_are_stored_in(tmp_path: Path) -> None:
    config = llama_config(hidden_size=64, intermediate_size=128)
    folder = save(random_model(config), tmp_path)
    with opened(folder) as plain, LLM(folder, **LLM_ARGUMENTS, quantization="int8") as llm:
        whole, small = model_size(plain), model_size(llm)
    assert (small.matmul_params, small.logits_params) == (whole.matmul_params, whole.logits_params)
    assert small.weight_bytes == whole.weight_bytes / 4  # scales have one dim


def test_every_layout_of_quantised_weights_is_read_whole() -> None:
    """Words of 4 bits and what else a GPU holds; scales are read, are no parameters and make no experts."""
    tensors = {
        "mlp_up_proj_weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        "mlp_up_proj_weight_scale": torch.zeros(16, 2, 2, dtype=torch.bfloat16),
        "mlp_experts_down_proj_packed": torch.zeros(4, 16, 32, dtype=torch.uint8),
        "mlp_experts_down_proj_scale": torch.zeros(4, 16, 2, dtype=torch.uint8),
        "places": torch.zeros(64, 64, dtype=torch.int32),
    }
    holder: Any = SimpleNamespace(
        runner=SimpleNamespace(step=SimpleNamespace(kv_caches={})),
        compiled=SimpleNamespace(split_calls=(), bound_tensors=tensors.items),
        hf_config=SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_experts_per_tok=2)),
    )
    size = model_size(holder)
    assert size.matmul_params == 16 * 64 + 4 * 16 * 64
    assert size.weight_bytes == 16 * 8 * 4 + 16 * 2 * 2 * 2 + 4 * 16 * 32 + 4 * 16 * 2
    experts = RoutedExperts(params=4 * 16 * 64, num_bytes=4 * 16 * 32 + 4 * 16 * 2, num_experts=4, top_k=2)
    assert size.experts == experts


@pytest.mark.parametrize("measure", [mean_of_steps, time_steps])
def test_every_step_that_is_asked_for_is_run(measure: Callable[..., object]) -> None:
    ran: list[int] = []
    measure(lambda: ran.append(1), 7, torch.device("cpu"))
    assert len(ran) == 7


def test_a_mean_is_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += 0.25 if clock[0] else 1.0

    assert mean_of_steps(run, 4, torch.device("cpu")) == (1.0 + 3 * 0.25) / 4


@pytest.mark.slow
def test_all_ranks_run_the_steps_that_are_timed(tmp_path: Path) -> None:
    with two_ranks(save(make_model("llama"), tmp_path)) as llm:
        ceilings = Ceilings(read_bytes_per_s=1e9, flops_per_s=1e9)
        (row,) = measure_latency(llm, [2], [CUDAGraphMode.NONE], context=4, steps=3, ceilings=ceilings)
        assert (row.batch_size, row.mode, row.padded_tokens) == (2, "NONE", 2)
        assert llm.collective_rpc("report")[1]["rank"] == 1  # still in step


def test_figures_of_several_ranks_or_engines_have_a_note() -> None:
    assert latency_notes(1, 1) == []
    (note,) = latency_notes(2, 1)
    assert "one of 2 ranks" in note and "not in the floor" in note
    (note,) = latency_notes(1, 3)
    assert "spread over 3 engines" in note
