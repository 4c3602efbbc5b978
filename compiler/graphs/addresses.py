"""Graphs read and write addresses: this checks that they still belong to the tensors captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.errors import CaptureError


@dataclass(frozen=True, slots=True)
class NamedAddress:
    """A tensor a graph was captured over, and where it was."""

    name: str
    tensor: torch.Tensor
    address: int
    nbytes: int


def addresses_of(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[NamedAddress, ...]:
    """Where these tensors are now."""
    return tuple(NamedAddress(name, t, t.data_ptr(), t.untyped_storage().nbytes()) for name, t in named)


def check_addresses(captured: Sequence[NamedAddress]) -> None:
    """Raise `CaptureError`, naming the tensor, if one moved or was resized since the capture."""
    for place in captured:
        if place.tensor.data_ptr() != place.address or place.tensor.untyped_storage().nbytes() < place.nbytes:
            raise CaptureError(
                f"{place.name} moved after the graph was captured (from {place.address:#x} to "
                f"{place.tensor.data_ptr():#x}), so a replay would read stale memory. Change its values in place "
                "(copy_), or capture again."
            )
