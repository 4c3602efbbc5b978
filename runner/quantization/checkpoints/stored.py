"""`StoredCheckpoint`, how one format stores quantised weights, and the reading of such files as a model needs them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Protocol

import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.quantization.checkpoints.headers import Wanted, check_tensors_of
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme

Parts = Mapping[str, torch.Tensor]
"""The stored tensors of one module, by the last part of their names."""

CutPacked = Callable[[str, Scheme, PackedWeight], PackedWeight]
"""A function from the path of a module, its scheme and its weight to the part of the weight that a rank holds."""


def whole_weight(path: str, scheme: Scheme, packed: PackedWeight) -> PackedWeight:
    """Return the weight as it is."""
    return packed


class WeightReader(Protocol):
    """How quantised weights are read, or made, of the tensors of files."""

    @property
    def quant_method(self) -> str:
        """The name of the format in a config, or what was asked for."""

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

        Raises `CheckpointError` for values that mean nothing.
        """


class StoredCheckpoint(WeightReader, Protocol):
    """A format of quantised checkpoints with the settings of one of them; `packed` takes what `tensors` says."""

    def tensors(
        self, path: str, scheme: Scheme, shape: tuple[int, int], stored: Collection[str]
    ) -> Mapping[str, Wanted]:
        """Return what the tensors of the module at `path` have to be, by the last part of their names.

        `shape`: of its weight in floats, `(num_columns, size)`. `stored`: the tensors that the files have of it, where
        a format stores a module in several ways. Raises `CheckpointError` for a shape that the format cannot store.
        """


def check_scale(path: str, name: str, scale: torch.Tensor) -> None:
    """Raise `CheckpointError` for scales that are not finite."""
    if not bool(scale.float().isfinite().all()):
        raise CheckpointError(f"{path}.{name} has values that are infinite or not numbers. Copy the file again.")


def read_weight(checkpoint: WeightReader, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
    """Return what `checkpoint.packed` does. Raises `CheckpointError` for scales that `dtype` cannot hold, too."""
    packed: PackedWeight = checkpoint.packed(path, parts, scheme, dtype)
    if packed.scale.is_floating_point() and not bool(packed.scale.isfinite().all()):
        raise CheckpointError(
            f"{path} has scales or offsets that are too large for {packed.scale.dtype}; give dtype='float32', or check "
            "the checkpoint."
        )
    return packed


def check_headers(
    slices: Mapping[str, Any],
    checkpoint: StoredCheckpoint,
    schemes: Mapping[str, Scheme],
    shapes: Mapping[tuple[str, ...], tuple[int, int]],
    ignored: Collection[str] = (),
) -> None:
    """Raise `CheckpointError` unless files have what quantised modules need; headers are read, and no weights.

    `schemes` are by the path of a module. `shapes` are those of weights in floats, by the paths of the modules that
    share one, of which the files may have any. `ignored`: patterns of the names of tensors that the model leaves out if
    it has no place for them, as transformers writes them.
    """
    for path, parts in quantised_parts(slices, checkpoint).items():
        is_left_out = any(re.search(pattern, f"{path}.{suffix}") for pattern in ignored for suffix in parts)
        if path not in schemes and not is_left_out:
            raise CheckpointError(
                f"{path} is quantised in the files ({', '.join(parts)}), and not by the model's config. Check that "
                "config.json belongs to these weights."
            )
    for paths, shape in shapes.items():
        of_paths = {path: _parts_of(path, slices, checkpoint) for path in paths}
        stored = [path for path, parts in of_paths.items() if parts] or [paths[0]]
        for path in stored:
            wanted = checkpoint.tensors(path, schemes[path], shape, of_paths[path])
            check_tensors_of(path, of_paths[path], wanted)


def quantised_parts(slices: Mapping[str, Any], checkpoint: WeightReader) -> dict[str, dict[str, Any]]:
    """Return the stored tensors of each quantised module by its path and by the last part of their names."""
    paths = dict.fromkeys(
        path for path, _, suffix in (name.rpartition(".") for name in slices) if suffix in checkpoint.marks
    )
    return {path: _parts_of(path, slices, checkpoint) for path in paths}


def _parts_of(path: str, slices: Mapping[str, Any], checkpoint: WeightReader) -> dict[str, Any]:
    names = ((suffix, f"{path}.{suffix}") for suffix in sorted(checkpoint.suffixes))
    return {suffix: slices[name] for suffix, name in names if name in slices}


def named_weights(
    slices: Mapping[str, Any],
    checkpoint: WeightReader,
    schemes: Mapping[str, Scheme],
    dtype: torch.dtype,
    cut: CutPacked = whole_weight,
) -> dict[str, Any]:
    """Return the stored tensors by the names of the model's parameters; each is read when it is indexed.

    `schemes` are by the path of a module. `cut` makes a rank's part of each quantised weight, which is read whole.
    """
    modules = quantised_parts(slices, checkpoint)
    taken = {f"{path}.{suffix}" for path, parts in modules.items() for suffix in parts}
    named = {name: stored for name, stored in slices.items() if name not in taken}
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
    checkpoint: WeightReader,
    schemes: Mapping[str, Scheme],
    dtype: torch.dtype,
    cut: CutPacked,
) -> Callable[[], PackedWeight]:
    def read() -> PackedWeight:
        stored = {name: part[...] for name, part in parts.items()}
        return cut(path, schemes[path], read_weight(checkpoint, path, stored, schemes[path], dtype))

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
