"""modules.json and the folders it names are read as sentence-transformers writes them, now and earlier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from piecegraph import LLM, PoolingParams
from piecegraph.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.pooling.modules import SentenceModules, sentence_modules
from piecegraph.runner.pooling.pool import PoolingType
from tests.runner.pooling.encoder_models import FAMILIES, hidden_states, save_model


def write(folder: Path, name: str, value: Any) -> None:
    """Write `value` as JSON."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


def modules(*kinds: str) -> list[dict[str, Any]]:
    """Return a modules.json: the transformer, then `kinds`, each in a folder of its own."""
    later = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds, start=1)
    ]
    return [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}, *later]


def read(folder: Path) -> SentenceModules:
    """Return the modules in `folder`."""
    found = sentence_modules(ModelSource(model=str(folder)))
    assert found is not None
    return found


def write_dense(folder: Path, path: str, in_features: int, out_features: int) -> torch.nn.Linear:
    """Write a Dense module with random weights, and return its linear layer."""
    write(
        folder,
        f"{path}/config.json",
        {
            "in_features": in_features,
            "out_features": out_features,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    linear = torch.nn.Linear(in_features, out_features)
    save_file(
        {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}, folder / path / "model.safetensors"
    )
    return linear


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, ["mean"]),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, ["cls", "last"]),
        ({"pooling_mode": "max"}, ["max"]),
        ({"pooling_mode": ["weightedmean", "cls"]}, ["weighted_mean", "cls"]),
        ({}, ["mean"]),
    ],
)
def test_pooling(written: dict[str, Any], found: list[str], tmp_path: Path) -> None:
    write(tmp_path, "modules.json", modules("Pooling", "Normalize"))
    write(tmp_path, "1_Pooling/config.json", written)
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": True})
    assert read(tmp_path) == SentenceModules(
        pooling=tuple(PoolingType(each) for each in found), normalize=True, max_seq_length=32, do_lower_case=True
    )


def test_no_modules(tmp_path: Path) -> None:
    assert sentence_modules(ModelSource(model=str(tmp_path))) is None


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        (("Pooling", "LSTM"), UnsupportedModel, "has a module 'sentence_transformers.models.LSTM' that cannot run"),
        (("Normalize",), UnsupportedModel, "or not at this place"),
        ((), UnsupportedModel, "has no Pooling module"),
        (("Pooling", "Normalize", "Dense"), UnsupportedModel, "has a Dense after Normalize"),
        (("Pooling", "Dense"), ModelError, "names the module '2_Dense', which has no config.json"),
    ],
)
def test_other_modules_are_refused(
    kinds: tuple[str, ...], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "modules.json", modules(*kinds))
    write(tmp_path, "1_Pooling/config.json", {})
    with pytest.raises(error, match=message):
        read(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ModelError, match=r"modules\.json is not valid JSON"):
        read(tmp_path)
    write(tmp_path, "modules.json", {"a": 1})
    with pytest.raises(ModelError, match="is no list of modules"):
        read(tmp_path)
    write(tmp_path, "modules.json", modules("Pooling", "Dense"))
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "median"})
    with pytest.raises(UnsupportedModel, match="pooling_mode=.*median"):
        read(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {})
    write_dense(tmp_path, "2_Dense", 4, 4)
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="the weights of the module '2_Dense'"):
        read(tmp_path)


def test_a_model_with_dense_modules_embeds_as_its_modules_say(tmp_path: Path) -> None:
    """Mean and maximum, then a linear layer and tanh, and length 1."""
    model = save_model(FAMILIES["bert"](), tmp_path)
    write(tmp_path, "modules.json", modules("Pooling", "Dense", "Normalize"))
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": ["mean", "max"]})
    linear = write_dense(tmp_path, "2_Dense", 64, 12)
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    with LLM(tmp_path, device="cpu", compiler="eager", max_num_seqs=2) as llm:
        assert llm.max_model_len == 16
        (output,) = llm.embed("The QUICK brown fox")
        (raw,) = llm.embed("The QUICK brown fox", pooling_params=PoolingParams(normalize=False))
    rows = hidden_states(model, output.prompt_token_ids)
    with torch.no_grad():
        wanted = linear(torch.cat([rows.mean(0), rows.max(0).values])).tanh()
    torch.testing.assert_close(torch.tensor(raw.outputs.embedding), wanted, atol=1e-5, rtol=1e-5)
    assert torch.tensor(output.outputs.embedding).norm().item() == pytest.approx(1.0)
    assert 1 not in output.prompt_token_ids  # [UNK], which upper case would be


def test_dense_modules_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_model(FAMILIES["bert"](), tmp_path)
    write(tmp_path, "modules.json", modules("Pooling", "Dense"))
    write(tmp_path, "1_Pooling/config.json", {})
    write_dense(tmp_path, "2_Dense", 30, 12)
    with pytest.raises(ConfigError, match="takes 30 features, but what comes before it gives 32"):
        LLM(tmp_path, device="cpu", compiler="eager")
