"""Experts of a plain checkpoint that are quantised while they load: which ones, and what they answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.errors import CheckpointError
from piecegraph.passes.kernels.moe.stored_experts import CLAMPED_SWIGLU, Gate
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.quantization import online
from piecegraph.runner.quantization.experts import QuantisedExperts, cut_experts, gate_of, of_expert, weights_of
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.shard import Shard
from piecegraph.runner.quantization.online import online_schemes
from piecegraph.runner.quantization.quantise import quantise_model
from piecegraph.tools.cache.entries.model_key import model_key
from tests.runner.quantization.checkpoints.written import change_tensors
from tests.runner.quantization.expert_models import ALL, dequantise_experts, experts_of, mixture
from tests.runner.quantization.test_llm_quantised import dequantised, largest_difference, load
from tests.runner.tiny_models import save

MAX_DIFFERENCE = {"int8": 0.15, "int4": 1e-3, "fp8": 1e-3}
"""Of log probabilities; with int8 inputs are rounded to bfloat16."""


def test_gates_are_known_by_what_they_compute() -> None:
    (first, *_) = experts_of(mixture("mixtral")).values()
    (clamped, *_) = experts_of(mixture("gpt-oss")).values()
    assert gate_of(first) == Gate("silu", False, 0.0, 0.0)
    assert gate_of(clamped) == Gate(CLAMPED_SWIGLU, True, 1.702, 7.0)
    first._apply_gate = lambda both: torch.nn.functional.silu(both.chunk(2, -1)[0]).clamp(max=16) * both.chunk(2, -1)[1]
    assert gate_of(first) is None, "it clamps"
    del first._apply_gate
    first.act_fn = torch.nn.ReLU()
    assert gate_of(first) is None and gate_of(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        pytest.param("mixtral", "int8", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", "int4", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "fp8", marks=pytest.mark.slow),
    ],
)
def test_log_probabilities_are_those_of_the_dequantised_model(
    family: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have a tensor for each expert, or with gpt-oss one for all, in columns.

    With int4, the kernel for linears that rounds float32 to bfloat16 is left out.
    """
    linears, embeddings = online.SCHEMES["int4"]
    exact = {**online.SCHEMES, "int4": (replace(linears, may_round=False), embeddings)}
    monkeypatch.setattr(online, "SCHEMES", exact)
    model = mixture(family, **(ALL if quantization == "int8" else {}))
    save(model, tmp_path)
    dequantise_experts(model, quantization)
    options = {"quantization": quantization, "dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    with load(tmp_path, **options) as llm:
        assert largest_difference(dequantised(model, quantization), llm) < MAX_DIFFERENCE[quantization]
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert f"2 layers of experts are {quantization}" in note
        assert "experts by the linears of the chosen experts, one expert at a time" in note


def test_experts_that_are_gated_otherwise_stay_floats() -> None:
    """The rest of the model is quantised, and the note says so."""
    note = str(quantise_model(mixture("mixtral", hidden_act="relu"), "int8", online_schemes("int8")))
    assert "MixtralExperts.gate_up_proj (their gate, or the shape of their weights, is of a kind that is not" in note
    assert "experts are" not in note


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save(mixture("mixtral"), tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    change_tensors(tmp_path, lambda tensors: tensors[name].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w2\.weight cannot be quantised to int8") as raised:
        load(tmp_path, enforce_eager=True)
    assert raised.value.exit_code == 3


@pytest.mark.slow
def test_the_key_and_explain_know_the_scheme_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    save(mixture("mixtral"), tmp_path)
    options: dict[str, Any] = {"source": ModelSource(model=str(tmp_path)), "device": "cpu", "dtype": "float32"}
    keys = {scheme: model_key(EngineConfig(**options, quantization=scheme)).key for scheme in ("int8", "fp8")}
    assert None not in keys.values() and len(set(keys.values())) == 2
    told = explain(EngineConfig(**options, quantization="fp8"))
    (note,) = [note for note in told.notes if note.startswith("quantization")]
    assert "2 layers of experts are fp8" in note and "MB float8_e4m3fn" in note


def test_a_module_keeps_what_its_class_reads() -> None:
    """Its attributes, but for the two float parameters."""
    model = mixture("mixtral")
    summary = quantise_model(model, "int8", online_schemes("int8"), device_type="cuda")
    assert "experts by our Triton kernel over pairs sorted by expert" in str(summary)
    module = model.get_submodule("model.layers.0.mlp.experts")
    assert isinstance(module, QuantisedExperts) and summary.experts.keys() == {
        "model.layers.0.mlp.experts", "model.layers.1.mlp.experts",
    }  # fmt: skip
    assert set(module._parameters) == {
        "gate_up_proj_packed", "gate_up_proj_scale", "down_proj_packed", "down_proj_scale",
    }  # fmt: skip
    assert module.gate_up_proj_packed.shape == (4, 192, 64) and module.gate_up_proj_scale.shape == (4, 192)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_part_of_experts_stands_for_the_same_numbers(quantization: str) -> None:
    """Two experts of four whole, then half of the rows of gate and of up of each, then half of the columns of down."""
    model = mixture("mixtral")
    quantise_model(model, quantization, online_schemes(quantization))
    module: Any = model.get_submodule("model.layers.0.mlp.experts")
    method = METHODS[module.scheme]
    shards = (
        ("gate_up_proj", Shard(dim=-3, full_size=4, parts=((2, 4, 2),))),
        ("gate_up_proj", Shard(dim=-2, full_size=192, parts=((48, 96, 48), (144, 192, 48)))),
        ("down_proj", Shard(dim=-1, full_size=96, parts=((48, 96, 48),))),
    )
    for short, shard in shards:
        whole = weights_of(module, short)
        floats = torch.stack([method.unpack(of_expert(whole, place)) for place in range(len(whole.values))])
        cut_experts(module, short, shard)
        part = weights_of(module, short)
        found = torch.stack([method.unpack(of_expert(part, place)) for place in range(len(part.values))])
        assert torch.equal(found, shard.of(floats)), (short, shard)
