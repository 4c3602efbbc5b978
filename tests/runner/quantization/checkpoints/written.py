"""Small checkpoints in each format, written by hand from its specification, with the dequantised model beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.runner.tiny_models import make_config, random_model, save

Tensors = dict[str, torch.Tensor]
Write = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A function from a weight to its stored tensors by suffix, and to the weight that they stand for."""


class Slice:
    """A tensor as safetensors shows one of a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_dtype(self) -> str:
        names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
        return {**names, torch.uint8: "U8", torch.int64: "I64"}[self._tensor.dtype]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._tensor[index]  # type: ignore[index]  # as the caller gives it


def slices(tensors: Tensors) -> dict[str, Slice]:
    return {name: Slice(tensor) for name, tensor in tensors.items()}


def words(values: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return non-negative integers in int32, along `dim`, padded with zeros; integer i of a group goes to place
    `order[i]`."""
    per_word = 32 // bits
    last = values.long().movedim(dim, -1)
    groups = F.pad(last, (0, -last.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    packed = (groups << (torch.tensor(order or range(per_word)) * bits)).sum(-1)
    return (packed - ((packed >> 31) << 32)).to(torch.int32).movedim(-1, dim).contiguous()


def affine(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers from 0, scales `[rows, groups]` in float16 and zero points, by group."""
    groups = weight.unflatten(1, (-1, group or weight.shape[1]))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    values = (groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    return values.flatten(1), scale, zero


def dequantised(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float) -> torch.Tensor:
    shift = zero.unsqueeze(-1) if isinstance(zero, torch.Tensor) else zero
    return ((values.unflatten(1, (scale.shape[1], -1)) - shift) * scale.float().unsqueeze(-1)).flatten(1)


def gptq(weight: torch.Tensor, bits: int = 4, group: int = 16, version: int = 1) -> tuple[Tensors, torch.Tensor]:
    values, scale, zero = affine(weight, bits, group)
    stored = {
        "qweight": words(values.t(), bits, 0),
        "qzeros": words(zero.t() - int(version == 1), bits, 1),
        "scales": scale.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group).to(torch.int32),
    }
    return stored, dequantised(values, scale, zero)


def awq(weight: torch.Tensor, group: int = 16) -> tuple[Tensors, torch.Tensor]:
    values, scale, zero = affine(weight, 4, group)
    order = (0, 4, 1, 5, 2, 6, 3, 7)  # of the channels 0 .. 7, the places in an int32; AWQ writes 0 2 4 6 1 3 5 7
    stored = {
        "qweight": words(values.t(), 4, 1, order),
        "qzeros": words(zero.t(), 4, 1, order),
        "scales": scale.t().contiguous(),
    }
    return stored, dequantised(values, scale, zero)


def packed_int4(weight: torch.Tensor, group: int = 16, is_symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    if is_symmetric:
        groups = weight.unflatten(1, (-1, group))
        scale = (groups.abs().amax(-1) / 7.5).bfloat16()
        values = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(1) + 8
        stored, zero = {}, torch.full(scale.shape, 8.0)
    else:
        values, scale, zero = affine(weight, 4, group)
        stored = {"weight_zero_point": words(zero, 4, 0)}
    stored |= {
        "weight_packed": words(values, 4, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, dequantised(values, scale, zero)


def int8_channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale.float()


def fp8_channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_blocks(weight: torch.Tensor, name: str = "weight_scale") -> tuple[Tensors, torch.Tensor]:
    """Blocks of 16 x 16, the last ones smaller."""
    rows, size = weight.shape
    padded = F.pad(weight, (0, -size % 16, 0, -rows % 16)).unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
    scale = padded.abs().amax((1, 3)) / 448
    every = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :size]
    values = (weight / every).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, name: scale}, values.float() * every


def rounded_inputs(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what a linear's input is rounded to: in int8 or e4m3 for each token, or in e4m3 for each 16 values."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        groups = F.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16)) if kind == "groups" else x
        largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9)
        if kind == "int8":
            near = (x / (largest / 127.5)).round().clamp(-128, 127) * (largest / 127.5)
        else:
            near = (groups / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)
        return near.flatten(-2)[..., : x.shape[-1]] if kind == "groups" else near

    return rounded


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    write: Write,
    inputs: str | None = None,
    *,
    leaves_one: bool = True,
    **sizes: int,
) -> PreTrainedModel:
    """Write a Llama whose projections are quantised, and return the model with the dequantised weights.

    `inputs`: how the inputs of these linears are rounded (`rounded_inputs`). `leaves_one`: one of them is left alone.
    """
    model = random_model(make_config("LlamaConfig", **sizes))
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if leaves_one and "layers.0.mlp.down" in name:
            continue
        stored, floats = write(tensors.pop(name).float())
        path = name.removesuffix(".weight")
        tensors.update({f"{path}.{suffix}": tensor for suffix, tensor in stored.items()})
        linear = model.get_submodule(path)
        assert isinstance(linear, torch.nn.Linear)
        linear.weight.data = floats
        if inputs is not None:
            rounded = rounded_inputs(inputs)
            linear.register_forward_pre_hook(lambda _, args, rounded=rounded: (rounded(args[0]),))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, lambda written: written.update(quantization_config=config))
    return model


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


LEFT = ["lm_head", "re:.*layers\\.0\\.mlp\\.down_proj"]


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, weight_format: str) -> dict[str, Any]:
    """Return the `quantization_config` that compressed-tensors writes for one group of all linears."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": weight_format,
        "config_groups": {"group_0": group},
        "ignore": LEFT,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
NO_DOWN = {"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}

FORMATS: dict[str, tuple[dict[str, Any], Write, str | None]] = {
    "W4A16": (compressed(INT4, None, "pack-quantized"), packed_int4, None),
    "W4A16 with zero points": (
        compressed({**INT4, "symmetric": False}, None, "pack-quantized"),
        lambda weight: packed_int4(weight, is_symmetric=False),
        None,
    ),
    "W8A8": (compressed(INT8, {**TOKENS, "type": "int"}, "int-quantized"), int8_channels, "int8"),
    "FP8_DYNAMIC": (compressed(FP8, {**TOKENS, "type": "float"}, "float-quantized"), fp8_channels, "tokens"),
    "FP8_BLOCK": (
        compressed(
            {**FP8, "strategy": "block", "block_structure": [16, 16]},
            {**TOKENS, "type": "float", "strategy": "group", "group_size": 16},
            "float-quantized",
        ),
        fp8_blocks,
        "groups",
    ),
    "FineGrainedFP8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16], **NO_DOWN},
        lambda weight: fp8_blocks(weight, "weight_scale_inv"),
        "groups",
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm", **NO_DOWN},
        awq,
        None,
    ),
}
"""By name: the config, the writer of a weight, and how inputs are rounded. GPTQ cannot leave modules alone."""

GPTQ: dict[str, Any] = {
    "bits": 4, "group_size": 16, "desc_act": False, "sym": False, "lm_head": False, "quant_method": "gptq",
    "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": None,
    "meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.05, "damp_auto_increment": 0.01, "mse": 0.0},
}  # fmt: skip
"""The `quantization_config` that gptqmodel writes."""
