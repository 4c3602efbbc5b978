"""`adapter_config.json`: ranks, scalings and targets by peft's rules; what cannot be applied is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.lora.peft_config import AdapterConfig, read_config

PATHS = [f"model.layers.{layer}.{name}" for layer in range(3) for name in ("self_attn.q_proj", "mlp.down_proj")]


def read(folder: Path, **fields: Any) -> AdapterConfig:
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")
    return read_config(folder)


def test_what_peft_writes_by_default_is_read(tmp_path: Path) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    assert read_config(tmp_path).rank == 4


def test_ranks_and_scalings(tmp_path: Path) -> None:
    config = read(tmp_path, rank_pattern={r"layers\.1\..*q_proj": 9}, alpha_pattern={"down_proj": 2})
    assert [config.rank_of(path) for path in PATHS] == [4, 4, 9, 4, 4, 4]
    assert [config.scaling_of(path) for path in PATHS[:3]] == [2.0, 0.5, 8 / 9]
    assert read(tmp_path, use_rslora=True).scaling_of(PATHS[0]) == 4.0


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "mlp.down_proj"], "exclude_modules": ["layers.2.mlp.down_proj"]},
        {"target_modules": r"model\.layers\.[01]\..*", "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj", "model.layers.1.mlp.down_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    ],
)
def test_targets_are_those_of_peft(fields: dict[str, Any], tmp_path: Path) -> None:
    config, theirs = read(tmp_path, **fields), LoraConfig(**fields)
    found = [config.targets(path, is_output=False, is_linear=True) for path in PATHS]
    assert found == [bool(check_target_module_exists(theirs, path)) for path in PATHS]
    assert True in found and False in found


def test_all_linear_leaves_out_the_output_and_embeddings(tmp_path: Path) -> None:
    config = read(tmp_path, target_modules="all-linear")
    assert config.targets("model.layers.0.q", is_output=False, is_linear=True)
    assert not config.targets("lm_head", is_output=True, is_linear=True)
    assert not config.targets("embed", is_output=False, is_linear=False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora=True is not available: DoRA"),
    ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\] is not available: .*aLoRA"),
    ({"bias": "lora_only"}, "bias='lora_only' is not available"),
    ({"lora_bias": True}, "lora_bias=True is not available"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not available"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not available: such an initialization changes"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"target_parameters": ["experts.w"]}, "target_parameters"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"use_qalora": True}, "use_qalora"),
    ({"kasa_config": {"a": 1}}, "kasa_config=.* is not available: this version does not know the field"),
    ({"peft_type": "IA3"}, "peft_type='IA3'; only 'LORA' adapters"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[next(iter(fields)) for fields, _ in REFUSED])
def test_other_adapters_are_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message) as raised:
        read(tmp_path, **fields)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r=0; it must be a whole number"),
        ({"target_modules": None}, "target_modules=None; it must be names of modules"),
        ({"target_modules": "(q"}, r"target_modules has '\(q', no valid pattern"),
        ({"lora_alpha": "x"}, "lora_alpha has 'x'; it must be a number above 0"),
        ({"rank_pattern": {"[": 3}}, "rank_pattern has '\\[', no valid pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern=\\[1\\]; it must be an object"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform="),
    ],
)
def test_bad_values_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **fields)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder; give the one with adapter_config.json"):
        read_config(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds a list, not an object"):
        read_config(tmp_path)
