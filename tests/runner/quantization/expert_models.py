"""Small mixtures of experts whose weights are quantised, with the dequantised model beside the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from piecegraph.runner.quantization.experts import gate_of
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.online import online_schemes
from tests.runner.quantization.checkpoints.written import Write, change_config, rounded_inputs
from tests.runner.tiny_models import make_config, random_model, save

ALL = {"num_experts_per_tok": 4}
"""Every token chooses every expert: with rounded inputs another choice could be as good, and no answer comparable."""

SIZES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {
        "name": "MixtralConfig", "num_local_experts": 4, "sliding_window": None, "hidden_size": 64,
        "intermediate_size": 96,
    },
    "qwen3-moe": {
        "name": "Qwen3MoeConfig", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "hidden_size": 64,
    },
    "gpt-oss": {
        "name": "GptOssConfig", "head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size": 64, "intermediate_size": 96,
    },
}  # fmt: skip
"""The configs, of sizes that groups of 32 divide."""


def mixture(family: str, **options: Any) -> PreTrainedModel:
    """Return a random float32 model."""
    return random_model(make_config(**{**SIZES[family], **options}))


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Return the modules of experts by path."""
    return {path: module for path, module in model.named_modules() if gate_of(module) is not None}


def dequantise_experts(model: PreTrainedModel, quantization: str) -> None:
    """Write the weights that quantised experts multiply by to the model, in place."""
    scheme = online_schemes(quantization)("", "Linear")
    assert scheme is not None
    method = METHODS[scheme.method]
    for module in experts_of(model).values():
        for parameter in (module.gate_up_proj, module.down_proj):
            for weight in parameter.data:
                rows = weight.t() if module.is_transposed else weight
                rows.copy_(method.unpack(method.pack(rows.contiguous(), scheme)))


def write_mixture(
    folder: Path, family: str, config: dict[str, Any], write: Write, inputs: str | None = None, **options: Any
) -> PreTrainedModel:
    """Write a model whose projections and experts are quantised, and return the one with the dequantised weights.

    `write` and `inputs` are those of `written.write_checkpoint`, `options` of the config.
    """
    model = mixture(family, **options)
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    suffixes = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    for name in [name for name in tensors if name.endswith(suffixes)]:
        stored, floats = write(tensors.pop(name).float())
        path = name.removesuffix(".weight")
        tensors.update({f"{path}.{suffix}": tensor for suffix, tensor in stored.items()})
        if ".experts." not in path:
            linear = model.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            linear.weight.data = floats
            if inputs is not None:
                rounded = rounded_inputs(inputs)
                linear.register_forward_pre_hook(lambda _, args, rounded=rounded: (rounded(args[0]),))
            continue
        *_, module, expert, short = path.replace("block_sparse_moe", "mlp").split(".")
        layer = path.split(".")[2]
        assert module == "experts"
        experts: Any = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        if short in ("w2", "down_proj"):
            experts.down_proj.data[int(expert)] = floats
        else:
            size = floats.shape[0]
            first = size if short in ("w3", "up_proj") else 0
            experts.gate_up_proj.data[int(expert), first : first + size] = floats
    if inputs is not None:
        for each in experts_of(model).values():
            each.forward = _rounding(each, rounded_inputs(inputs))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, lambda written: written.update(quantization_config=config))
    return model


def _rounding(module: Any, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the forward of experts whose two inputs are rounded."""

    def forward(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up = (module.gate_up_proj[ids] @ rounded(hidden)[:, None, :, None]).squeeze(-1)
        down = module.down_proj[ids] @ rounded(module._apply_gate(gate_up)).unsqueeze(-1)
        return (down.squeeze(-1) * weights.unsqueeze(-1)).sum(1)

    return forward


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
"""The `quantization_config` of gpt-oss."""


def write_mxfp4(folder: Path, **options: Any) -> PreTrainedModel:
    """Write a gpt-oss whose experts are in MXFP4, and return the one with the weights that transformers makes of it."""
    model = mixture("gpt-oss", **options)
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for path, module in experts_of(model).items():
        for short in ("gate_up_proj", "down_proj"):
            num_experts, size, rows = tensors.pop(f"{path}.{short}").shape
            shape = (num_experts, rows, size // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{path}.{short}_blocks": blocks, f"{path}.{short}_scales": scales}
            module._parameters[short].data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, lambda written: written.update(quantization_config=MXFP4))
    return model
