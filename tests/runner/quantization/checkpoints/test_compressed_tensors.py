"""Checkpoints of compressed-tensors, written by hand from the format: read exactly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from piecegraph.errors import CheckpointError, ConfigError, PiecegraphError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.models.without_weights import load_without_weights
from piecegraph.runner.quantization.checkpoints.compressed_tensors import CompressedTensors
from tests.runner.quantization.checkpoints.written import (
    INT8,
    Tensors,
    change_tensors,
    compressed,
    int8_channels,
    words,
    write_checkpoint,
)
from tests.runner.quantization.test_llm_quantised import MAX_DIFFERENCE, largest_difference, load


def written_config(weight_format: str = "pack-quantized", **weights: object) -> dict[str, Any]:
    return compressed({**INT8, **weights}, None, weight_format)


def write_w8a16(folder: Path, weight_format: str = "pack-quantized") -> PreTrainedModel:
    """Write a checkpoint of 8-bit weights, and return the model with the dequantised weights."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        stored, floats = int8_channels(weight)
        if weight_format == "pack-quantized":
            values = stored.pop("weight").long() + 128
            stored |= {"weight_packed": words(values, 8, 1), "weight_shape": torch.tensor(weight.shape)}
        return stored, floats

    return write_checkpoint(folder, written_config(weight_format), write, intermediate_size=50)


@pytest.mark.parametrize("weight_format", ["pack-quantized", "int-quantized"])
def test_log_probabilities_are_those_of_the_dequantised_model(weight_format: str, tmp_path: Path) -> None:
    """Sizes that 4 does not divide are padded in the file, and 13 of 15 linears are quantised there and here."""
    reference = write_w8a16(tmp_path, weight_format)
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
BAD_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "scale of groups": (
        lambda t: t.update({f"{Q}_scale": torch.ones(32, 2)}),
        r"weight_scale is F32 \[32, 2\].* or F16 \[32, 1\]",
    ),
    "no scale": (lambda t: t.pop(f"{Q}_scale"), "missing: .*q_proj.weight_scale"),
    "no shape": (lambda t: t.pop(f"{Q}_shape"), "missing: .*q_proj.weight_shape"),
    "a wrong shape": (
        lambda t: t.update({f"{Q}_shape": torch.tensor([32, 40])}),
        r"weight_shape is not \[32, 32\]",
    ),
    "no weight": (lambda t: t.pop(f"{Q}_packed"), "missing: .*q_proj.weight_packed"),
    "a scale that is no number": (
        lambda t: t[f"{Q}_scale"].fill_(float("nan")),
        "weight_scale has values that are inf",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    change, message = BAD_TENSORS[name]
    write_w8a16(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path, quantization=None, enforce_eager=True)
    assert raised.value.exit_code == 3


OTHERS: list[tuple[dict[str, Any], str]] = [
    (written_config(num_bits=2), r"whose weights\.num_bits=2 cannot be read here"),
    (written_config(strategy="tensor"), r"weights\.strategy='tensor' cannot"),
    (written_config(type="float", strategy="group"), r"weights\.strategy='group' cannot"),
    (written_config(actorder="group"), r"weights\.actorder='group' cannot"),
    (written_config("nvfp4-pack-quantized"), "format='nvfp4-pack-quantized' cannot"),
    ({**written_config(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme has type=None"),
    ({**written_config(), "config_groups": {}}, r"config_groups=\[\] cannot"),
]


@pytest.mark.parametrize(("written", "message"), OTHERS)
def test_other_schemes_are_refused_by_name(written: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as raised:
        CompressedTensors.of(written)
    assert raised.value.exit_code == 3


def test_inputs_with_fixed_scales_are_refused() -> None:
    written = written_config()
    written["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": False}
    with pytest.raises(UnsupportedModel, match=r"input_activations\.strategy="):
        CompressedTensors.of(written)


def test_modules_are_ignored_by_name_class_or_pattern() -> None:
    def is_quantised(ignore: list[str], path: str, class_name: str = "Linear") -> bool:
        return CompressedTensors.of({**written_config(), "ignore": ignore}).scheme_of(path, class_name) is not None

    ignore = ["lm_head", "re:.*gate$"]
    found = [is_quantised(ignore, path) for path in ("lm_head", "layers.0.gate", "layers.0.gate_proj")]
    assert found == [False, False, True]
    assert not is_quantised(ignore, "embedding", "Embedding")
    assert not is_quantised(["Linear"], "layers.0.up_proj")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8' is made from a plain checkpoint, and this one is quantised"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is not yet available with a quantised checkpoint"),
    ],
)
def test_combinations_that_are_not_there_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_w8a16(tmp_path)
    with pytest.raises(PiecegraphError, match=message) as raised:
        load(tmp_path, **{"quantization": None, **options})
    assert isinstance(raised.value, ConfigError)


def test_the_model_without_weights_has_the_same_tensors(tmp_path: Path) -> None:
    """It is traced in place of the model while that is read."""
    write_w8a16(tmp_path)
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
    reference = write_w8a16(tmp_path)
    with load(tmp_path, quantization=None, dtype="float32") as llm:
        assert largest_difference(reference, llm) < MAX_DIFFERENCE
