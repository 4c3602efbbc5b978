"""Comparison of a weight of the model that peft has saved beside an adapter's matrices with the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.lora.modules import Adaptable, AdaptedModules, rows_of_weight
from piecegraph.runner.quantization.methods.shard import Shard
from piecegraph.runner.quantization.modules import QuantisedEmbedding, QuantisedLinear

_COMPARED_ROWS = 16
"""How many rows of a weight are compared on each rank."""

_QUANTISED_DIFFERENCE = 0.2
"""By how much a quantised weight may differ from one in floats, of the largest: 4 bits have steps of 0.07 to 0.14."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRows:
    """Rows of the weight of a module on a rank that has it."""

    shard: Shard | None  # the rank's part of the weight; None: all of it
    index: torch.Tensor  # [num_rows] int64, of the rank's part
    rows: torch.Tensor  # [num_rows, size] float32
    is_quantised: bool


FindBases = Callable[[str], Sequence[BaseRows]]
"""Returns the rows of the module at a path, of each rank that has it."""


def base_rows(modules: AdaptedModules, path: str) -> list[BaseRows]:
    """Return rows of the module at `path` as one item, or nothing if this process does not have it."""
    module = modules.modules.get(path)
    if module is None:
        return []
    shape = modules.shapes[path]
    whole = shape.of_weight
    num_rows = (whole if shape.shard is None else shape.shard.local_shape(whole))[0]
    index = torch.linspace(0, num_rows - 1, min(_COMPARED_ROWS, num_rows)).long()
    is_quantised = isinstance(module, QuantisedLinear | QuantisedEmbedding)
    return [BaseRows(shard=shape.shard, index=index, rows=rows_of_weight(module, index), is_quantised=is_quantised)]


def check_base(folder: Path, path: str, tensor: torch.Tensor, shape: Adaptable, bases: FindBases) -> None:
    """Raise `CheckpointError` unless the weight `tensor` in an adapter's file is that of the module at `path`.

    Where no rank that can be asked has the module, the shape alone is compared.
    """
    if tuple(tensor.shape) != shape.of_weight:
        raise CheckpointError(
            f"{folder}: the weight of {path} in it is {tuple(tensor.shape)}, the model's {shape.of_weight}; it is "
            "for another model, or for one whose vocabulary was resized."
        )
    for base in bases(path):
        theirs = (tensor if base.shard is None else base.shard.of(tensor))[base.index].float()
        most = _QUANTISED_DIFFERENCE * float(theirs.abs().max()) if base.is_quantised else 1e-3
        if not torch.allclose(theirs, base.rows, rtol=2e-2, atol=most):
            raise CheckpointError(f"{folder}: the weight of {path} in it is not the model's; it is for another model.")
