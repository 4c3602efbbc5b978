"""Adapters that do not fit are refused before anything is changed, with what was found and what was wanted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from piecegraph import LoRARequest
from piecegraph.errors import CheckpointError, PiecegraphError, UnsupportedModel
from piecegraph.runner.lora.adapter import LoadedAdapter, read_adapter
from piecegraph.runner.lora.modules import AdaptedModules, LoraOptions, adapt_modules
from tests.runner.lora.adapters import write_adapter
from tests.runner.tiny_models import make_model

TARGETS = ["q_proj", "embed_tokens", "lm_head"]
PREFIX = "base_model.model."
Q = f"{PREFIX}model.layers.1.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def modules() -> AdaptedModules:
    options = LoraOptions(num_slots=2, max_rank=8)
    return adapt_modules(make_model("llama"), options, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(make_model("llama"), tmp_path, seed=1, target_modules=TARGETS, lora_alpha=12)
    return tmp_path


def read(folder: Path, modules: AdaptedModules) -> LoadedAdapter:
    return read_adapter(LoRARequest("one", 1, str(folder)), modules, torch.float32, pinned=False)


def change(folder: Path, tensors: Callable[[Tensors], object] | None = None, **fields: Any) -> None:
    if tensors is not None:
        found = load_file(folder / "adapter_model.safetensors")
        tensors(found)
        save_file(found, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}), encoding="utf-8")


def test_matrices_are_read_with_their_scaling(folder: Path, modules: AdaptedModules) -> None:
    stored, found = load_file(folder / "adapter_model.safetensors"), read(folder, modules)
    assert len(found.matrices) == 4
    a, b = found.matrices[Q.removeprefix(PREFIX)]
    assert torch.equal(a, stored[f"{Q}.lora_A.weight"]) and torch.equal(b, 3 * stored[f"{Q}.lora_B.weight"])
    assert found.nbytes == sum(each.nbytes for name, each in stored.items() if "base_layer" not in name)
    digest = found.digest
    assert read(folder, modules).digest == digest
    change(folder, lora_alpha=13)
    assert read(folder, modules).digest != digest


BAD: dict[str, tuple[Callable[[Tensors], object] | None, dict[str, Any], type[PiecegraphError], str]] = {
    "A of another shape": (
        lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 33)}), {}, CheckpointError,
        r"A of model\.layers\.1\.self_attn\.q_proj is \[4, 33\]; with rank 4 this model takes \[4, 32\]",
    ),
    "another rank": (None, {"r": 5}, CheckpointError, r"is \[4, .*\]; with rank 5 this model takes \[5, "),
    "no B": (lambda t: t.pop(f"{Q}.lora_B.weight"), {}, CheckpointError, "q_proj has no matrix B"),
    "a module that is missing": (
        lambda t: [t.pop(f"{Q}.lora_{kind}.weight") for kind in "AB"], {}, CheckpointError,
        r"targets model\.layers\.1\.self_attn\.q_proj, and adapter_model\.safetensors has no matrices for it",
    ),
    "a module that the model has not": (
        lambda t: t.update({f"{PREFIX}model.layers.7.q_proj.lora_A.weight": torch.zeros(4, 32)}), {}, CheckpointError,
        r"changes model\.layers\.7\.q_proj, and the model has no linear layer or embedding of that name",
    ),
    "an embedding's matrix of a linear": (
        lambda t: t.update({f"{Q}.lora_embedding_A": t.pop(f"{Q}.lora_A.weight")}), {}, CheckpointError,
        "does not fit model.layers.1.self_attn.q_proj, a linear layer",
    ),
    "another vocabulary": (
        lambda t: t.update({f"{PREFIX}lm_head.base_layer.weight": torch.zeros(130, 32)}), {}, CheckpointError,
        r"the weight of lm_head in it is \(130, 32\), the model's \(128, 32\)",
    ),
    "another model's embedding": (
        lambda t: t[f"{PREFIX}lm_head.base_layer.weight"].add_(1), {}, CheckpointError,
        "the weight of lm_head in it is not the model's",
    ),
    "no number": (
        lambda t: t[f"{Q}.lora_A.weight"].fill_(float("nan")), {}, CheckpointError,
        "A of model.layers.1.self_attn.q_proj has values that are infinite or not numbers",
    ),
    "DoRA": (
        lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(32)}), {}, UnsupportedModel,
        "lora_magnitude_vector' is neither A nor B of a LoRA",
    ),
    "a large rank": (
        lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(9, 32), f"{Q}.lora_B.weight": torch.zeros(32, 9)}),
        {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 9}}, PiecegraphError,
        "has rank 9, above max_lora_rank=8; make the LLM with max_lora_rank=9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_adapters_are_refused(name: str, folder: Path, modules: AdaptedModules) -> None:
    tensors, fields, kind, message = BAD[name]
    change(folder, tensors, **fields)
    with pytest.raises(kind, match=message) as raised:
        read(folder, modules)
    assert raised.value.exit_code == 3


def test_missing_or_damaged_files_are_refused(folder: Path, modules: AdaptedModules) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read: .* Copy or download it again"):
        read(folder, modules)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors; copy or download"):
        read(folder, modules)
    (folder / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="adapter_model.bin is not read, because unpickling may run any code"):
        read(folder, modules)


def test_what_is_not_prepared_is_named(folder: Path) -> None:
    options = LoraOptions(num_slots=2, max_rank=8, target_modules=("q_proj",))
    some = adapt_modules(make_model("llama"), options, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"is not among lora_target_modules=\['q_proj'\]; add '"):
        read(folder, some)
    unread = tuple(Q.removeprefix(PREFIX).replace("1", layer) for layer in "01")
    none = AdaptedModules({}, {}, LoraOptions(num_slots=2, max_rank=8), (*unread, "lm_head", "model.embed_tokens"))
    with pytest.raises(CheckpointError, match="uses in a way of its own, which no adapter can change here"):
        read(folder, none)
    others = replace(none, unread=(), other_classes=dict.fromkeys(none.unread, "Conv1D"))
    with pytest.raises(CheckpointError, match="a Conv1D, and adapters can change plain linear layers and embeddings"):
        read(folder, others)
