"""The scales of cached keys and values are found under every name, and bad ones are refused with theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.all_formats import stored_checkpoint
from piecegraph.runner.quantization.checkpoints.cache_scales import (
    StoredScales,
    has_cache_scales,
    is_cache_scale,
    stored_scales,
)

FIRST, SECOND = "model.layers.0.self_attn", "transformer.h.1.attn"
LAYERS = {FIRST: 2, SECOND: 2}
Tensors = dict[str, torch.Tensor]


def read(folder: Path, tensors: Tensors) -> dict[str, StoredScales]:
    """Read scales that lie in two files, beside a weight."""
    names = sorted(tensors)
    files = [folder / "1.safetensors", folder / "2.safetensors"]
    save_file({"model.norm.weight": torch.ones(3), **{name: tensors[name] for name in names[::2]}}, files[0])
    save_file({name: tensors[name] for name in names[1::2]}, files[1])
    assert has_cache_scales(files) == bool(tensors)
    assert all(is_cache_scale(name) for name in tensors)
    return stored_scales([*files, folder / "other.bin"], LAYERS)


def by_module(key: str, value: str, *numbers: torch.Tensor) -> Tensors:
    of_keys, of_values = numbers or (torch.tensor(0.5), torch.tensor([2.0, 4.0]))
    return {f"{layer}.{end}": each.clone() for layer in LAYERS for end, each in ((key, of_keys), (value, of_values))}


NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]


@pytest.mark.parametrize(("key", "value"), NAMES)
def test_each_tools_names(key: str, value: str, tmp_path: Path) -> None:
    """One for all heads, or one for each, in any shape and float."""
    found = read(tmp_path, by_module(key, value, torch.tensor([0.5]).bfloat16(), torch.tensor([[[2.0]], [[4.0]]])))
    assert set(found) == set(LAYERS)
    for scales in found.values():
        assert scales.key.tolist() == [0.5] and scales.value.tolist() == [2.0, 4.0]
        assert scales.key.dtype is scales.value.dtype is torch.float32


def test_one_for_keys_and_values(tmp_path: Path) -> None:
    found = read(tmp_path, {f"{layer}.kv_scale": torch.tensor(0.25) for layer in LAYERS})
    assert all(each.tolist() == [0.25] for scales in found.values() for each in scales)


def test_there_may_be_none(tmp_path: Path) -> None:
    assert read(tmp_path, {}) == {}
    assert not is_cache_scale("model.layers.0.self_attn.k_proj.weight_scale")


BAD: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "zero": (
        lambda t: t[f"{FIRST}.k_scale"].fill_(0),
        r"0\.self_attn\.k_scale .* not finite numbers above 0 \(\[0\.0\]",
    ),
    "negative": (lambda t: t[f"{SECOND}.v_scale"][1].fill_(-1), r"h\.1\.attn\.v_scale .* not finite numbers above 0"),
    "nan": (lambda t: t[f"{FIRST}.v_scale"].fill_(float("nan")), r"self_attn\.v_scale .* not finite numbers above 0"),
    "infinite": (lambda t: t[f"{FIRST}.v_scale"].fill_(float("inf")), r"self_attn\.v_scale .* not finite numbers"),
    "another shape": (
        lambda t: t.update({f"{FIRST}.v_scale": torch.ones(3)}),
        r"self_attn\.v_scale in the checkpoint is torch\.float32 \[3\]; .* one for each of the layer's 2 KV heads",
    ),
    "empty": (lambda t: t.update({f"{FIRST}.v_scale": torch.ones(0)}), r"v_scale in the checkpoint is .* \[0\]"),
    "integers": (lambda t: t.update({f"{FIRST}.k_scale": torch.ones(1).int()}), "k_scale .* is torch.int32"),
    "missing": (
        lambda t: t.pop(f"{SECOND}.v_scale"),
        r"none of the values of transformer\.h\.1\.attn \(trans.*v_scale",
    ),
    "no layer": (
        lambda t: t.update({"model.layers.7.self_attn.k_scale": torch.ones(1)}),
        r"model\.layers\.7\.self_attn\.k_scale .* the model has no attention layer there; .* like model\.layers\.0",
    ),
    "two": (
        lambda t: t.update({f"{FIRST}.k_proj.k_scale": torch.ones(1)}),
        r"two scales of the cached keys of model\.layers\.0\.self_attn: .*k_scale and .*k_scale\. Remove one",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_are_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    tensors = by_module("k_scale", "v_scale")
    change(tensors)
    with pytest.raises(CheckpointError, match=message) as raised:
        read(tmp_path, tensors)
    assert raised.value.exit_code == 3


def test_those_of_other_stages_are_left_to_them(tmp_path: Path) -> None:
    """A stage refuses what its own layers lack, also if the files have scales of other layers alone."""
    tensors = by_module("k_scale", "v_scale")
    save_file(tensors, tmp_path / "model.safetensors")
    files, own = [tmp_path / "model.safetensors"], {FIRST: LAYERS[FIRST]}
    assert list(stored_scales(files, own, has_others=True)) == list(own)
    with pytest.raises(CheckpointError, match="the model has no attention layer there"):
        stored_scales(files, own)
    with pytest.raises(CheckpointError, match="and none of the keys of model.layers.9.self_attn"):
        stored_scales(files, {"model.layers.9.self_attn": 2}, has_others=True)


def test_those_of_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    save_file(by_module("k_scale", "v_scale"), tmp_path / "model.safetensors")
    files = [tmp_path / "model.safetensors"]
    assert list(stored_scales(files, {FIRST: LAYERS[FIRST]}, of_drafts=("transformer.h.1.",))) == [FIRST]


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_bits", 4), ("type", "int"), ("strategy", "channel"), ("symmetric", False), ("dynamic", True)],
)
def test_other_schemes_are_refused_by_name(field: str, value: Any) -> None:
    written = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    assert stored_checkpoint(written) is None
    with pytest.raises(UnsupportedModel, match=f"kv_cache_scheme has {field}={value!r}; caches of 8 bits in float"):
        stored_checkpoint({**written, "kv_cache_scheme": {**SCHEME, field: value}})
