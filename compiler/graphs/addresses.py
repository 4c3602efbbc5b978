"""The addresses that graphs read and write, and the checks that they still belong to the captured tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.errors import CaptureError


@dataclass(frozen=True, slots=True)
class NamedAddress:
    """A tensor that a graph was captured over, with its address at that time."""

    name: str
    tensor: torch.Tensor
    address: int
    nbytes: int


def addresses_of(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[NamedAddress, ...]:
    """Return the tensors with their current addresses."""
    return tuple(NamedAddress(name, t, t.data_ptr(), t.untyped_storage().nbytes()) for name, t in named)


class Addresses:
    """Captured tensors with a cheap check of their addresses: one loop in C."""

    def __init__(self, captured: Sequence[NamedAddress]) -> None:
        self._captured = tuple(captured)
        self._tensors = [place.tensor for place in captured]
        self._addresses = [place.address for place in captured]

    def check(self) -> None:
        """Raise `CaptureError`, naming the tensor, if one moved since the capture."""
        if list(map(torch.Tensor.data_ptr, self._tensors)) != self._addresses:
            check_addresses(self._captured)


def check_addresses(captured: Sequence[NamedAddress]) -> None:
    """Raise `CaptureError`, naming the tensor, if one moved or was resized since the capture."""
    for place in captured:
        if place.tensor.data_ptr() != place.address or place.tensor.untyped_storage().nbytes() < place.nbytes:
            raise CaptureError(
                f"{place.name} moved after the graph was captured (from {place.address:#x} to "
                f"{place.tensor.data_ptr():#x}), so a replay would read stale memory. Change its values in place "
                "(copy_), or capture again."
            )
