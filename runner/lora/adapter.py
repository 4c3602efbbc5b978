"""Reading an adapter that peft wrote, checked against the modules of the model that it is to be applied to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from piecegraph.errors import CheckpointError, ConfigError, UnsupportedModel
from piecegraph.runner.lora.base_weights import FindBases, base_rows, check_base
from piecegraph.runner.lora.modules import AdaptedModules
from piecegraph.runner.lora.peft_config import CONFIG_FILE, AdapterConfig, read_config
from piecegraph.runner.lora.request import LoRARequest

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_A, _B = (".lora_A.weight", ".lora_embedding_A"), (".lora_B.weight", ".lora_embedding_B")
_BASE = ".base_layer.weight"


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


def read_adapter(
    request: LoRARequest,
    modules: AdaptedModules,
    dtype: torch.dtype,
    *,
    pinned: bool,
    bases: FindBases | None = None,
) -> LoadedAdapter:
    """Return the adapter of `request`, with matrices in `dtype`, in page-locked memory if `pinned`.

    `bases` finds the model's own weights, of which the files may have copies to compare; None: in `modules` alone.

    Raises `CheckpointError` for files that are missing, damaged or made for another model, `UnsupportedModel` for a
    kind of adapter that cannot be applied, and `ConfigError` for one that this engine has no room for. Nothing is
    changed then.
    """
    folder = Path(request.lora_path).expanduser()
    config = read_config(folder)
    tensors, digest = _read_tensors(folder, config)
    pairs = _pairs(folder, tensors, modules, partial(base_rows, modules) if bases is None else bases)
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
    folder: Path, tensors: Mapping[str, torch.Tensor], modules: AdaptedModules, bases: FindBases
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the matrices A and B by the path of their module. Raises `CheckpointError` and `UnsupportedModel`."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        path, kind = _parsed(folder, name)
        shape = modules.shapes.get(path)
        if shape is None:
            raise CheckpointError(_not_there(folder, path, modules))
        if kind == "base":
            check_base(folder, path, tensor, shape, bases)
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
