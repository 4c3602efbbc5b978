"""Loading gives the weights that were saved, or one message that says what is wrong with them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from piecegraph.errors import (
    CheckpointError,
    ModelError,
    ModelNotFound,
    PiecegraphError,
    UnsupportedModel,
)
from piecegraph.progress import Phase
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import LoadedModel, load_model
from tests.runner.tiny_models import llama_config, random_model, save

CPU = torch.device("cpu")


def load(model: Path | str, **options: object) -> LoadedModel:
    source = ModelSource(model=str(model), **options)  # type: ignore[arg-type]
    return load_model(source, load_config(source), dtype=torch.float32, device=CPU)


@pytest.fixture
def folder(llama_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama's folder, free to be broken."""
    return Path(shutil.copytree(llama_dir, tmp_path / "model"))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, edit: Callable[[dict[str, object]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_threads_that_load_wait_for_each_other(llama_dir: Path) -> None:
    """transformers changes the default dtype of the process while it makes a model."""
    source = ModelSource(model=str(llama_dir))
    config = load_config(source)
    inside: list[str] = []
    met: list[list[str]] = []

    def on_phase(phase: Phase) -> None:
        inside.append(threading.current_thread().name)
        time.sleep(0.05)
        met.append(list(inside))
        inside.pop()

    def load_half() -> None:
        load_model(source, config, dtype=torch.bfloat16, device=CPU, on_phase=on_phase)

    threads = [threading.Thread(target=load_half) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(met) >= 3
    assert all(len(each) == 1 for each in met), met
    assert torch.get_default_dtype() is torch.float32


def test_weights_are_those_saved(llama: PreTrainedModel, llama_dir: Path) -> None:
    """The model is in eval mode and without gradients, and the load is reported."""
    phases: list[Phase] = []
    source = ModelSource(model=str(llama_dir))
    loaded = load_model(source, load_config(source), dtype=torch.float32, device=CPU, on_phase=phases.append)
    for name, weight in llama.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert {phase.name for phase in phases} == {"load"}
    assert (phases[0].total, phases[0].seconds) == (0, None)
    assert phases[-2].done == phases[-2].total == len(llama.state_dict())
    assert phases[-1].seconds is not None
    assert "LlamaForCausalLM" in phases[-1].detail


def test_weights_are_cast_to_the_dtype_asked_for(llama_dir: Path) -> None:
    source = ModelSource(model=str(llama_dir))
    loaded = load_model(source, load_config(source), dtype=torch.bfloat16, device=CPU)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    """A checkpoint without lm_head is whole if the config ties it."""
    loaded = load(save(random_model(llama_config(tie_word_embeddings=True)), tmp_path))
    model = loaded.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_dummy_weights_need_no_checkpoint_and_repeat(folder: Path) -> None:
    """Random, the same for the same seed, and the process's own random state untouched."""
    (folder / "model.safetensors").unlink()
    source = ModelSource(model=str(folder), load_format="dummy")
    state = torch.get_rng_state()
    first, second, other = (
        load_model(source, load_config(source), dtype=torch.float32, device=CPU, seed=seed).model.state_dict()
        for seed in (0, 0, 1)
    )
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_overrides_change_the_config(llama_dir: Path) -> None:
    """A field that neither the file nor the class has can be overridden, too."""
    overrides = {"max_position_embeddings": 7, "sliding_window": 3}
    config = load_config(ModelSource(model=str(llama_dir), hf_overrides=overrides))
    assert (config.max_position_embeddings, config.sliding_window) == (7, 3)
    assert config.num_hidden_layers == 2


BROKEN_WEIGHTS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"),
    (lambda w: w.update({"model.layers.1.extra": torch.zeros(1)}), r"1 unexpected: model\.layers\.1\.extra"),
    (
        lambda w: w.update({"model.norm.weight": torch.zeros(5)}),
        r"1 of another shape: model\.norm\.weight \(checkpoint \(5,\), model \(32,\)\)",
    ),
    (lambda w: w.clear(), r"\d+ missing: .*\.\.\. and \d more\."),
]


@pytest.mark.parametrize(("edit", "message"), BROKEN_WEIGHTS)
def test_tensors_that_do_not_fit_are_listed(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    edit_weights(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_several_problems_are_listed_together(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update(extra=w.pop("lm_head.weight")))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight; 1 unexpected: extra"):
        load(folder)


@pytest.mark.parametrize("size", [0, 4, 200, -100])
def test_a_truncated_file_is_named(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=re.escape(f"{file} is corrupt or truncated")):
        load(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights to read at"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no folder '/no/such/folder'"),
        ("./nowhere", r"no folder './nowhere'\. Give a model folder, a \.gguf file or a hub id"),
        ("/no/such/model.gguf", "no file '/no/such/model.gguf'"),
    ],
)
def test_a_path_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        load(name)


def test_a_hub_id_that_is_not_here_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"no model 'nobody/nothing': .*offline"):
        load("nobody/nothing")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json, so it is not a model"):
        load(tmp_path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        load(file)


BROKEN_CONFIGS: list[tuple[Callable[[dict[str, object]], object], type[PiecegraphError], str]] = [
    (lambda c: c.pop("num_attention_heads"), ModelError, r"has no num_attention_heads, .*hf_overrides"),
    (lambda c: c.update(model_type="no-such-type"), ModelError, "no-such-type"),
    (lambda c: c.update(num_attention_heads="four"), ModelError, "not valid: .*num_attention_heads"),
    (
        lambda c: c.update(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        UnsupportedModel,
        "quantised with 'bitsandbytes'",
    ),
    (lambda c: c.update(hidden_act="nope"), ModelError, "no model can be made from the config of .*'nope'"),
    (lambda c: c.update(rope_parameters={"rope_type": "nope", "rope_theta": 1e4}), ModelError, "no model can be made"),
    (lambda c: c.update(num_key_value_heads=0), ModelError, "num_key_value_heads=0; it must be a whole number"),
    (lambda c: c.update(num_key_value_heads=3), ModelError, "the first must be a multiple"),
    (lambda c: c.update(hidden_size=0), ModelError, "hidden_size=0; it must be a whole number from 1"),
    (lambda c: c.update(hidden_size=33, head_dim=None), ModelError, "not valid: .*33"),
    (lambda c: c.update(num_hidden_layers=10**9), ModelError, "it must be a whole number from 1 to 10000"),
]

GENERATION_CONFIGS = [
    ("[1, 2]", "holds a list; an object is needed"),
    ('{"eos', "is not valid JSON"),
    ("[" * 100_000, "is not valid JSON"),
    ('{"eos_token_id": "x"}', "has eos_token_id='x'; it must be a token id"),
    ('{"eos_token_id": [1, true]}', "it must be a token id, or a list of them"),
]


@pytest.mark.parametrize(("text", "message"), GENERATION_CONFIGS, ids=["list", "cut", "deep", "text", "bool"])
def test_a_generation_config_that_cannot_be_used(folder: Path, text: str, message: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "content",
    [b"", random.Random(0).randbytes(4000), b"\x80\x04K\x01.", b"h\x05.", b"\x80\x02h\x05."],
    ids=["empty", "random", "pickle", "memo", "memo of protocol 2"],
)
def test_a_damaged_pickle_file_is_a_checkpoint_error(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt|cannot be read"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_named_pipe_holds_no_weights(folder: Path, name: str) -> None:
    """Opening it would wait for ever."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load(folder)


@pytest.mark.parametrize(("edit", "error", "message"), BROKEN_CONFIGS)
def test_a_config_that_cannot_be_used(
    folder: Path, edit: Callable[[dict[str, object]], object], error: type[PiecegraphError], message: str
) -> None:
    edit_config(folder, edit)
    with pytest.raises(error, match=message):
        load(folder)


def test_a_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize("name", ["pipe.gguf", "config.json", "tokenizer.json"])
def test_a_named_pipe_is_not_a_regular_file(name: str, tmp_path: Path) -> None:
    """The pipe is not opened, which would block."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    model = tmp_path / name if name.endswith(".gguf") else tmp_path
    with pytest.raises(ModelError, match="is not a regular file"):
        load_config(ModelSource(model=str(model)))
