"""Checkpoints of compressed-tensors, written by hand from the format: read exactly, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from piecegraph.errors import CheckpointError, ConfigError, PiecegraphError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.models.load import load_config, load_model
from piecegraph.runner.models.without_weights import load_without_weights
from piecegraph.runner.quantization.compressed_tensors import ChannelCheckpoint, read_checkpoint_config
from tests.runner.quantization.test_llm_quantised import MAX_DIFFERENCE, largest_difference, load
from tests.runner.tiny_models import make_config, random_model, save

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}


def written_config(weight_format: str = "pack-quantized", **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": weight_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers\\.0\\.mlp\\.down_proj"],
    }


def packed(values: torch.Tensor) -> torch.Tensor:
    """Return int8 values in int32, four in each, the first in the lowest bits, each 128 too large."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.long() + 128, (0, -columns % 4)).view(rows, -1, 4)
    words = (padded << torch.tensor([0, 8, 16, 24])).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def write_checkpoint(folder: Path, weight_format: str = "pack-quantized") -> PreTrainedModel:
    """Write a quantised checkpoint, and return the model with the dequantised weights."""
    model = random_model(make_config("LlamaConfig", intermediate_size=50))
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight") and "layers.0.mlp.down" not in name]
    for number, name in enumerate(names):
        weight = tensors.pop(name)
        scale = (weight.abs().amax(1, keepdim=True) / (100 + number)).bfloat16()
        values = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
        if weight_format == "pack-quantized":
            tensors[f"{name}_packed"] = packed(values)
            tensors[f"{name}_shape"] = torch.tensor(values.shape)
        else:
            tensors[name] = values
        model.get_parameter(name).data = values.float() * scale.float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, lambda config: config.update(quantization_config=written_config(weight_format)))
    return model


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("weight_format", ["pack-quantized", "int-quantized"])
def test_log_probabilities_are_those_of_the_dequantised_model(weight_format: str, tmp_path: Path) -> None:
    """Sizes that 4 does not divide are padded in the file, and 13 of 15 linears are quantised there and here."""
    reference = write_checkpoint(tmp_path, weight_format)
    with load(tmp_path, quantization=None, dtype="float32", compiler="eager") as llm:
        assert largest_difference(reference, llm) < MAX_DIFFERENCE
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert "13 linears are int8" in note and "2 x Linear.weight (not quantised in the checkpoint)" in note
        assert llm.reload_weights() > 13
        assert largest_difference(reference, llm) < MAX_DIFFERENCE
        model = llm._loaded.model.model  # type: ignore[union-attr]
        attention = model.model.layers[1].self_attn
        stored = load_file(tmp_path / "model.safetensors")
        scale = stored["model.layers.1.self_attn.q_proj.weight_scale"].float()
        exact = attention.q_proj.weight_packed.float() * attention.q_proj.weight_scale[:, None]
        assert torch.equal(attention.q_proj.weight_scale, scale[:, 0])
        assert torch.equal(exact, reference.get_parameter("model.layers.1.self_attn.q_proj.weight"))


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "scale of groups": (lambda t: t.update({f"{Q}_scale": torch.ones(32, 2)}), "of another shape: .*weight_scale"),
    "no scale": (lambda t: t.pop(f"{Q}_scale"), "missing: .*q_proj.weight_scale"),
    "no shape": (lambda t: t.pop(f"{Q}_shape"), "q_proj.weight_packed is packed, and its weight_shape is missing"),
    "a wrong shape": (lambda t: t.update({f"{Q}_shape": torch.tensor([32, 40])}), r"weights of shape \[32, 40\] take"),
    "no weight": (lambda t: t.pop(f"{Q}_packed"), "missing: .*q_proj.weight_packed"),
    "a scale that is no number": (
        lambda t: t[f"{Q}_scale"].fill_(float("nan")),
        "weight_scale has values that are inf",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    change, message = BAD_TENSORS[name]
    write_checkpoint(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path, quantization=None, enforce_eager=True)
    assert raised.value.exit_code == 3


OTHERS: list[tuple[dict[str, Any], str]] = [
    (written_config(num_bits=4), r"whose weights\.num_bits=4 cannot be read here"),
    (written_config(symmetric=False), r"weights\.symmetric=False cannot"),
    (written_config(strategy="group", group_size=128), r"weights\.strategy='group' cannot"),
    (written_config(type="float"), r"weights\.type='float' cannot"),
    (written_config("float-quantized"), "format='float-quantized' cannot"),
    ({**written_config(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
    ({**written_config(), "config_groups": {}}, r"config_groups=\[\] cannot"),
]


@pytest.mark.parametrize(("written", "message"), OTHERS)
def test_other_schemes_are_refused_by_name(written: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as raised:
        read_checkpoint_config(written)
    assert raised.value.exit_code == 3


def test_quantised_activations_are_refused() -> None:
    written = written_config()
    written["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    with pytest.raises(UnsupportedModel, match="input_activations="):
        read_checkpoint_config(written)


def test_modules_are_ignored_by_name_class_or_pattern() -> None:
    checkpoint = ChannelCheckpoint(("lm_head", "re:.*gate$"))
    found = [checkpoint.is_quantised(path, "Linear") for path in ("lm_head", "layers.0.gate", "layers.0.gate_proj")]
    assert found == [False, False, True]
    assert not checkpoint.is_quantised("embedding", "Embedding")
    assert not ChannelCheckpoint(("Linear",)).is_quantised("layers.0.up_proj", "Linear")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8' is made from a plain checkpoint, and this one is quantised"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is not yet available with a quantised checkpoint"),
    ],
)
def test_combinations_that_are_not_there_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(PiecegraphError, match=message) as raised:
        load(tmp_path, **{"quantization": None, **options})
    assert isinstance(raised.value, ConfigError)


def test_the_model_without_weights_has_the_same_tensors(tmp_path: Path) -> None:
    """It is traced in place of the model while that is read."""
    write_checkpoint(tmp_path)
    config = EngineConfig(source=ModelSource(model=str(tmp_path)), device="cpu", dtype="float32")
    hf_config = load_config(config.source)
    read = load_model(config.source, hf_config, dtype=torch.float32, device=torch.device("cpu"))
    found, wanted = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in loaded.model.state_dict().items()}
        for loaded in (load_without_weights(config), read)
    )
    assert found == wanted and found[f"{Q}_packed"][1] is torch.int8
    assert any("13 linears are int8" in note for note in explain(config).notes)


@pytest.mark.slow
def test_a_compiled_model_reads_the_same_weights(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path)
    with load(tmp_path, quantization=None, dtype="float32") as llm:
        assert largest_difference(reference, llm) < MAX_DIFFERENCE
