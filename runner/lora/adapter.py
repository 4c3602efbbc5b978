"""Reading an adapter that peft wrote, checked against the modules of the model that it is to be applied to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from piecegraph.errors import CheckpointError, ConfigError, UnsupportedModel
from piecegraph.runner.lora.modules import Adaptable, AdaptedModules, rows_of_weight
from piecegraph.runner.lora.peft_config import CONFIG_FILE, AdapterConfig, read_config
from piecegraph.runner.lora.request import LoRARequest
from piecegraph.runner.quantization.modules import QuantisedEmbedding, QuantisedLinear

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_A, _B = (".lora_A.weight", ".lora_embedding_A"), (".lora_B.weight", ".lora_embedding_B")
_BASE = ".base_layer.weight"

_COMPARED_ROWS = 16
"""How many rows of a base weight in an adapter's file are compared with the model's."""

_QUANTISED_DIFFERENCE = 0.2
"""By how much a quantised weight may differ from one in floats, of the largest: 4 bits have steps of 0.07 to 0.14."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter on the CPU, immutable: of each module's path its A `[rank, size]` and its B, times the scaling."""

    request: LoRARequest
    digest: bytes  # of its contents
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """The bytes of the matrices."""
        return sum(each.nbytes for pair in self.matrices.values() for each in pair)


def read_adapter(request: LoRARequest, modules: AdaptedModules, dtype: torch.dtype, *, pinned: bool) -> LoadedAdapter:
    """Return the adapter of `request`, with matrices in `dtype`, in page-locked memory if `pinned`.

    Raises `CheckpointError` for files that are missing, damaged or made for another model, `UnsupportedModel` for a
    kind of adapter that cannot be applied, and `ConfigError` for one that this engine has no room for. Nothing is
    changed then.
    """
    folder = Path(request.lora_path).expanduser()
    config = read_config(folder)
    tensors, digest = _read_tensors(folder, config)
    pairs = _pairs(folder, tensors, modules)
    _check_complete(config, pairs, modules)
    matrices = {path: _matrices(config, path, *pair, modules, dtype, pinned=pinned) for path, pair in pairs.items()}
    return LoadedAdapter(request, digest, matrices)


def _read_tensors(folder: Path, config: AdapterConfig) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return the tensors of an adapter's file, and a digest of both files. Raises `CheckpointError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = folder / WEIGHTS_FILE
    try:
        data = file.read_bytes()
        tensors = load(data)
    except FileNotFoundError:
        todo = "copy or download the files again"
        if (folder / "adapter_model.bin").exists():
            todo = (
                "adapter_model.bin is not read, because unpickling may run any code: save the adapter again with peft"
            )
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}; {todo}.") from None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy or download it again.") from error
    return tensors, hashlib.sha256(data + config.content).digest()


def _pairs(
    folder: Path, tensors: Mapping[str, torch.Tensor], modules: AdaptedModules
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the matrices A and B by the path of their module. Raises `CheckpointError` and `UnsupportedModel`."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        path, kind = _parsed(folder, name)
        shape = modules.shapes.get(path)
        if shape is None:
            raise CheckpointError(_not_there(folder, path, modules))
        if kind == "base":
            _check_base(folder, path, tensor, modules.modules.get(path), shape)
            continue
        if ("embedding" in name.rpartition(".")[2]) != shape.is_embedding:
            what = "an embedding" if shape.is_embedding else "a linear layer"
            raise CheckpointError(f"{folder}: {name} does not fit {path}, {what}; the adapter is for another model.")
        found.setdefault(path, {})[kind] = tensor
    for path, pair in found.items():
        if len(pair) < 2:
            missing = "B" if "a" in pair else "A"
            raise CheckpointError(f"{folder}: {path} has no matrix {missing}. Copy or download {WEIGHTS_FILE} again.")
    return {path: (pair["a"], pair["b"]) for path, pair in found.items()}


def _parsed(folder: Path, name: str) -> tuple[str, str]:
    """Return the module's path and the kind of a tensor, "a", "b" or "base". Raises for any other tensor."""
    path = name.removeprefix(_PREFIX)
    for kind, ends in (("a", _A), ("b", _B), ("base", (_BASE,))):
        for end in ends:
            if path.endswith(end):
                return path.removesuffix(end), kind
    raise UnsupportedModel(
        f"{folder}: the tensor {name!r} is neither A nor B of a LoRA; such adapters (DoRA, biases, saved modules) are "
        "not applied here. Merge it into the weights (peft's merge_and_unload)."
    )


def _not_there(folder: Path, path: str, modules: AdaptedModules) -> str:
    """Return why the model has no module for a tensor of the adapter."""
    if path in modules.other_classes:
        return (
            f"{folder}: it changes {path}, a {modules.other_classes[path]}, and adapters can change plain linear "
            "layers and embeddings here. Merge the adapter into the weights (peft's merge_and_unload)."
        )
    if (names := modules.options.target_modules) is not None:
        return (
            f"{folder}: it changes {path}, which is not among lora_target_modules={list(names)}; add "
            f"{path.rpartition('.')[2]!r}, or leave the argument out."
        )
    if path in modules.unread:
        return (
            f"{folder}: it changes {path}, whose weight the model's code uses in a way of its own, which no adapter "
            "can change here. Merge the adapter into the weights (peft's merge_and_unload)."
        )
    return (
        f"{folder}: it changes {path}, and the model has no linear layer or embedding of that name that an adapter can "
        "change; it is for another model."
    )


def _check_base(folder: Path, path: str, tensor: torch.Tensor, module: Any, shape: Adaptable) -> None:
    """Raise `CheckpointError` unless a base weight that peft saved beside an embedding's matrices is the model's.

    `module`: None in a process that does not hold it, where the shape alone is compared.
    """
    whole = (shape.size, shape.num_columns) if shape.is_embedding else (shape.num_columns, shape.size)
    if tuple(tensor.shape) != whole:
        raise CheckpointError(
            f"{folder}: the weight of {path} in it is {tuple(tensor.shape)}, the model's {whole}; it is "
            "for another model, or for one whose vocabulary was resized."
        )
    if module is None:
        return
    if shape.shard is not None:
        tensor = shape.shard.of(tensor)
    index = torch.linspace(0, len(tensor) - 1, min(_COMPARED_ROWS, len(tensor))).long()
    theirs, ours = tensor[index].float(), rows_of_weight(module, index)
    is_quantised = isinstance(module, QuantisedLinear | QuantisedEmbedding)
    most = _QUANTISED_DIFFERENCE * float(theirs.abs().max()) if is_quantised else 1e-3
    if not torch.allclose(theirs, ours, rtol=2e-2, atol=most):
        raise CheckpointError(f"{folder}: the weight of {path} in it is not the model's; it is for another model.")


def _check_complete(config: AdapterConfig, pairs: Mapping[str, object], modules: AdaptedModules) -> None:
    """Raise `CheckpointError` if a module that the config targets has no matrices, or nothing is targeted."""
    missing = [
        path
        for path, shape in modules.shapes.items()
        if path not in pairs and config.targets(path, is_output=shape.is_output, is_linear=not shape.is_embedding)
    ]
    if missing:
        raise CheckpointError(
            f"{config.folder}: {CONFIG_FILE} targets {missing[0]}, and {WEIGHTS_FILE} has no matrices for it "
            f"({len(missing)} modules are missing). Copy the adapter again; or it is for another model."
        )
    if not pairs:
        raise CheckpointError(f"{config.folder}: {WEIGHTS_FILE} holds no matrices. Copy or download it again.")


def _matrices(
    config: AdapterConfig,
    path: str,
    a: torch.Tensor,
    b: torch.Tensor,
    modules: AdaptedModules,
    dtype: torch.dtype,
    *,
    pinned: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and the scaled B of a module. Raises for matrices that do not fit."""
    shape, rank = modules.shapes[path], config.rank_of(path)
    for name, tensor, wanted in (("A", a, (rank, shape.size)), ("B", b, (shape.num_columns, rank))):
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(
                f"{config.folder}: {name} of {path} is {list(tensor.shape)}; with rank {rank} this model takes "
                f"{list(wanted)}. It is for another model, or {CONFIG_FILE} is."
            )
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{config.folder}: {name} of {path} has values that are infinite or not numbers.")
    if rank > modules.options.max_rank:
        raise ConfigError(
            f"{config.folder}: {path} has rank {rank}, above max_lora_rank={modules.options.max_rank}; make the LLM "
            f"with max_lora_rank={rank}."
        )
    down, up = a.to(dtype).contiguous(), (b.float() * config.scaling_of(path)).to(dtype).contiguous()
    return (down.pin_memory(), up.pin_memory()) if pinned else (down, up)
