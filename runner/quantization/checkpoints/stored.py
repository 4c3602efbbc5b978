"""`StoredCheckpoint`, how one format stores quantised weights, and the reading of such files as a model needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme

Parts = Mapping[str, torch.Tensor]
"""The stored tensors of one module, by the last part of their names."""

CutPacked = Callable[[str, Scheme, PackedWeight], PackedWeight]
"""A function from the path of a module, its scheme and its weight to the part of the weight that a rank holds."""


def whole_weight(path: str, scheme: Scheme, packed: PackedWeight) -> PackedWeight:
    """Return the weight as it is."""
    return packed


class StoredCheckpoint(Protocol):
    """A format of quantised checkpoints with the settings of one of them."""

    @property
    def quant_method(self) -> str:
        """The name of the format in a config."""

    marks: ClassVar[tuple[str, ...]]
    """The last parts of tensors' names of which a quantised module has one or more."""

    suffixes: ClassVar[frozenset[str]]
    """The last parts of the names of a quantised module's tensors; others, such as its bias, are read as they are."""

    of_all_experts: ClassVar[tuple[str, ...]]
    """The suffixes of tensors that hold a parameter of all experts, behind the parameter's name."""

    def scheme_of(self, path: str, class_name: str) -> Scheme | None:
        """Return the scheme of the module at `path`, or None if it is not quantised.

        The linears of experts are asked for by the paths that they have in files, as "Linear".
        """

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return the weight of the module at `path` as its method stores it, with scales in `dtype` if that is free.

        Raises `CheckpointError` for tensors that are missing or do not fit each other.
        """


def part_of(path: str, parts: Parts, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the tensor `name` of a module. Raises `CheckpointError` if it is missing or not of `dtype`."""
    found = parts.get(name)
    if found is None:
        raise CheckpointError(f"the checkpoint has a tensor missing: {path}.{name}. Copy or download the files again.")
    if dtype is not None and found.dtype is not dtype:
        raise CheckpointError(f"{path}.{name} is {found.dtype}, and {dtype} is needed. Check the checkpoint.")
    return found


def check_shape(path: str, name: str, tensor: torch.Tensor, *wanted: int) -> None:
    """Raise `CheckpointError` if a tensor of a module has another shape."""
    if tuple(tensor.shape) != wanted:
        raise CheckpointError(
            f"{path}.{name} is of another shape: {tuple(tensor.shape)}, and the module's other tensors need {wanted}. "
            "Check the checkpoint."
        )


def check_scale(path: str, name: str, scale: torch.Tensor) -> None:
    """Raise `CheckpointError` for scales that are not finite."""
    if not bool(scale.float().isfinite().all()):
        raise CheckpointError(f"{path}.{name} has values that are infinite or not numbers. Copy the file again.")


def named_weights(
    slices: Mapping[str, Any],
    checkpoint: StoredCheckpoint,
    schemes: Mapping[str, Scheme],
    dtype: torch.dtype,
    cut: CutPacked = whole_weight,
) -> dict[str, Any]:
    """Return the stored tensors by the names of the model's parameters; each is read when it is indexed.

    `schemes` are by the path of a module. `cut` makes a rank's part of each quantised weight, which is read whole.
    """
    named: dict[str, Any] = {}
    modules: dict[str, dict[str, Any]] = {}
    for name in slices:
        path, _, suffix = name.rpartition(".")
        if suffix in checkpoint.marks:
            modules[path] = {}
    for name, stored in slices.items():
        path, _, suffix = name.rpartition(".")
        if path in modules and suffix in checkpoint.suffixes:
            modules[path][suffix] = stored
        else:
            named[name] = stored
    for path, parts in modules.items():
        values, scale = lazy_weight(_reader(path, parts, checkpoint, schemes, dtype, cut))
        named[f"{path}.weight_packed"], named[f"{path}.weight_scale"] = values, scale
    return named


def lazy_weight(read: Callable[[], PackedWeight]) -> tuple[Any, Any]:
    """Return the values and the scales of a weight, as transformers reads tensors of a file; `read` is called once."""
    weight = _LazyWeight(read)
    return _LazyPart(weight, "values"), _LazyPart(weight, "scale")


def _reader(
    path: str,
    parts: Mapping[str, Any],
    checkpoint: StoredCheckpoint,
    schemes: Mapping[str, Scheme],
    dtype: torch.dtype,
    cut: CutPacked,
) -> Callable[[], PackedWeight]:
    def read() -> PackedWeight:
        if path not in schemes:
            raise CheckpointError(
                f"{path} is quantised in the files, and not by the model's config. Check that they belong together."
            )
        stored = {name: part[...] for name, part in parts.items()}
        return cut(path, schemes[path], checkpoint.packed(path, stored, schemes[path], dtype))

    return read


class _LazyWeight:
    """A weight that is read once for all its parts, by whichever thread comes first, and then dropped."""

    def __init__(self, read: Callable[[], PackedWeight]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._found: dict[str, torch.Tensor] = {}

    def take(self, part: str) -> torch.Tensor:
        with self._lock:
            if part not in self._found:
                packed = self._read()
                self._found = {"values": packed.values, "scale": packed.scale}
            return self._found.pop(part)


class _LazyPart:
    """The values or the scales of a weight, as transformers reads a tensor of a file."""

    def __init__(self, weight: _LazyWeight, part: str) -> None:
        self._weight, self._part = weight, part

    def get_dtype(self) -> str:
        """Return safetensors' name of a dtype that is not converted: the values are as the model needs them."""
        return "U8"

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._weight.take(self._part)
