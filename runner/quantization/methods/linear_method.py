"""`LinearMethod`: how the weights of a linear layer are stored and applied; `Scheme`, which says what a module gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from piecegraph.runner.quantization.methods.shard import Shard

Block = tuple[int, int]
"""The output channels and the columns of the input that share a scale."""


DEQUANTISED = "GEMM over weights that are dequantised 2048 channels at a time"
"""What multiplies by weights of few bits on a CPU that has no kernel for them."""

STREAMED = "our Triton kernel for up to 256 rows, GEMM over weights that are dequantised for more"
"""The kernels for weights of 8 bits and float inputs on a GPU, as `explain` shows them."""

STREAMED_PACKED = "our Triton kernel for up to 64 rows, GEMM over weights that are dequantised for more"
"""The same for weights of 4 bits."""


class NotFinite(ValueError):
    """Weights have an infinite value or a NaN."""


class DoesNotFit(ValueError):
    """Weights have a shape that a scheme cannot store; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the weights of one module are stored."""

    method: str  # a name in `METHODS`
    group_size: int = 0  # columns of the input that share a scale; 0: all of them
    block_rows: int = 1  # output channels that share a scale
    has_offset: bool = False  # whether a group has an offset beside its scale
    may_round: bool = False  # whether float32 inputs and scales may be rounded to bfloat16, for a faster kernel

    def __str__(self) -> str:
        if self.block_rows > 1:
            return f"{self.method} in blocks of {self.block_rows} x {self.group_size}"
        return f"{self.method} in groups of {self.group_size}" if self.group_size else self.method


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight `[num_columns, size]` as a method stores it."""

    values: torch.Tensor
    scale: torch.Tensor
    block: Block = (1, 0)  # as of `Scheme`; only methods whose op needs it read it


class LinearMethod(Protocol):
    """One way to store the weights of a linear layer or an embedding, and to multiply by them."""

    @property
    def name(self) -> str:
        """The name of the method."""

    @property
    def kernels(self) -> Mapping[str, str]:
        """The kernels that multiply, by the type of the device, for `explain`."""

    @property
    def inputs(self) -> str:
        """The inputs of the product: "floats", or numbers rounded with a scale for each of the "tokens", or of the
        "groups" of a block's columns. A rank with a part of a token needs to know the largest magnitude of all."""

    def empty(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return tensors of the shapes that `weight`, `[num_columns, size]`, takes, on its device and without values.

        Raises `DoesNotFit`.
        """

    def pack(self, weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
        """Return `weight` quantised, as new tensors. Raises `NotFinite` and `DoesNotFit`."""

    def cut(self, packed: PackedWeight, shard: Shard) -> PackedWeight:
        """Return a rank's part of a weight, which stands for the same numbers, as new tensors.

        `shard` is of the weight `[num_columns, size]`: of its columns (dim -2) or of the size of its input (dim -1).
        Scales that ranks would share are repeated for smaller groups. Raises `DoesNotFit`.
        """

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the weights that `apply` multiplies by, `[num_columns, size]`, in the dtype of the scale."""

    def apply(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, largest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `x @ weight.T + bias`, `[..., num_columns]`, in the dtype of `x`, `[..., size]`.

        `largest`, where `inputs` is "tokens": the largest magnitude of each token `[..., 1]`, of which `x` is a part.
        """

    def rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Return the rows `index` of the weights, `[*index.shape, size]`, in the dtype of the scale."""


def check_finite(weight: torch.Tensor) -> None:
    """Raise `NotFinite` for a weight with values that are not finite."""
    if not bool(weight.isfinite().all()):
        raise NotFinite("it has values that are infinite or not numbers")


def row_parts(weight: torch.Tensor) -> list[slice]:
    """Return the rows of a weight in parts that are quantised one after another.

    Several weights are quantised at the same time while a checkpoint is read, and what is computed meanwhile would be a
    few copies of each in floats.
    """
    return [slice(first, first + _ROWS_AT_ONCE) for first in range(0, weight.shape[0], _ROWS_AT_ONCE)]


_ROWS_AT_ONCE = 256


def num_groups(size: int, group_size: int) -> int:
    """Return the groups of a row. Raises `DoesNotFit`."""
    if group_size and size % group_size:
        raise DoesNotFit(f"groups of {group_size} do not divide its {size} columns")
    return size // group_size if group_size else 1
