"""Checkpoints of the library compressed-tensors: which ones can be read, and their tensors as a model stores them.

Read are weights of 8 bits with a scale for each output channel and without quantised activations (the preset W8A16 with
the strategy `channel`), in the formats `pack-quantized` and `int-quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from piecegraph.errors import CheckpointError, UnsupportedModel

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized")

_WEIGHTS: Mapping[str, object] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "group_size": None,
    "actorder": None,
    "dynamic": False,
    "block_structure": None,
}
"""The description of weights that can be read. A field that is left out has this value, but for the first four."""

_VALUES_IN_INT32 = 4


@dataclass(frozen=True, slots=True)
class ChannelCheckpoint:
    """Which modules of a checkpoint are quantised: plain linears except for those that are ignored."""

    ignore: tuple[str, ...]  # names of modules, names of classes, or `re:` and a pattern for the start of a name

    def is_quantised(self, path: str, class_name: str) -> bool:
        """Return whether the module at `path` is quantised."""
        return class_name == "Linear" and not any(
            re.match(entry[3:], path) if entry.startswith("re:") else entry in (path, class_name)
            for entry in self.ignore
        )


def read_checkpoint_config(written: Mapping[str, Any]) -> ChannelCheckpoint:
    """Return what a `quantization_config` says. Raises `UnsupportedModel`, naming what cannot be read."""
    groups = written.get("config_groups") or {}
    for name, found, is_readable in (
        ("format", written.get("format"), written.get("format") in FORMATS),
        ("kv_cache_scheme", written.get("kv_cache_scheme"), not written.get("kv_cache_scheme")),
        ("sparsity_config", written.get("sparsity_config"), not written.get("sparsity_config")),
        ("transform_config", written.get("transform_config"), not written.get("transform_config")),
        ("config_groups", list(groups), len(groups) == 1),
    ):
        if not is_readable:
            raise _unsupported(name, found)
    (group,) = groups.values()
    if group.get("targets") != ["Linear"]:
        raise _unsupported("targets", group.get("targets"))
    for name in ("input_activations", "output_activations"):
        if group.get(name):
            raise _unsupported(name, group[name])
    weights = group.get("weights") or {}
    for name, wanted in _WEIGHTS.items():
        default = None if name in tuple(_WEIGHTS)[:4] else wanted
        if (found := weights.get(name, default)) != wanted:
            raise _unsupported(f"weights.{name}", found)
    return ChannelCheckpoint(tuple(written.get("ignore") or ()))


def _unsupported(name: str, found: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights are quantised with {METHOD!r}, whose {name}={found!r} cannot be read here; what can is symmetric "
        f"int8 weights with a scale for each channel (W8A16), in the formats {' and '.join(FORMATS)}. Use such a "
        "checkpoint, or an unquantised one with quantization='int8'."
    )


class _Unpacked:
    """An int8 weight `[num_columns, size]` that is stored in int32, read when it is indexed."""

    def __init__(self, packed: Any, name: str, shape: Sequence[int]) -> None:
        self._packed, self._name, self._shape = packed, name, list(shape)

    def get_shape(self) -> list[int]:
        """Return the shape of the weight."""
        return self._shape

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return "I8"

    def __getitem__(self, index: object) -> torch.Tensor:
        packed: torch.Tensor = self._packed[...]
        values = (packed.contiguous().view(torch.uint8).to(torch.int16) - 128).to(torch.int8)
        return values[:, : self._shape[1]].contiguous()


class _Channels:
    """Scales `[num_columns, 1]` without their last dim."""

    def __init__(self, scale: Any, name: str) -> None:
        self._scale, self._name = scale, name

    def get_shape(self) -> list[int]:
        """Return the shape without its last dim if that is 1, else the whole shape, which then does not fit."""
        shape: list[int] = self._scale.get_shape()
        return shape[:1] if len(shape) == 2 and shape[1] == 1 else shape

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return str(self._scale.get_dtype())

    def __getitem__(self, index: object) -> torch.Tensor:
        scale: torch.Tensor = self._scale[...]
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{self._name} has values that are infinite or not numbers. Copy the file again.")
        return scale.reshape(self.get_shape())


@contextmanager
def opened_checkpoint(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the tensors of the files by the names of the model's parameters; each is read when it is indexed.

    Raises `CheckpointError` for packed weights whose shape is missing or does not fit.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        shapes: dict[str, list[int]] = {}
        for file in files:
            handle = stack.enter_context(safe_open(str(file), framework="pt"))
            for name in handle.keys():  # noqa: SIM118  no mapping
                if name.endswith(".weight_shape"):
                    shapes[name.removesuffix("_shape")] = handle.get_tensor(name).tolist()
                else:
                    tensors[name] = handle.get_slice(name)
        yield dict(_renamed(tensors, shapes))


def _renamed(tensors: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> Iterator[tuple[str, Any]]:
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            yield name, _Unpacked(tensor, name, _checked_shape(name, tensor, shapes.get(name.removesuffix("_packed"))))
        elif name.endswith(".weight_scale"):
            yield name, _Channels(tensor, name)
        elif name.endswith(".weight") and f"{name}_scale" in tensors:  # int-quantized
            if tensor.get_dtype() != "I8":
                raise CheckpointError(f"{name} has a scale and is {tensor.get_dtype()}, not I8. Check the checkpoint.")
            yield f"{name}_packed", tensor
        else:
            yield name, tensor


def _checked_shape(name: str, packed: Any, shape: list[int] | None) -> list[int]:
    """Return the shape of an unpacked weight. Raises `CheckpointError`."""
    if shape is None:
        raise CheckpointError(f"{name} is packed, and its weight_shape is missing. Copy or download the files again.")
    found = packed.get_shape()
    if packed.get_dtype() != "I32" or len(shape) != 2 or found != [shape[0], -(-shape[1] // _VALUES_IN_INT32)]:
        raise CheckpointError(
            f"{name} is {packed.get_dtype()} {found}; weights of shape {shape} take I32 [rows, columns / "
            f"{_VALUES_IN_INT32}]. Check the checkpoint."
        )
    return shape
