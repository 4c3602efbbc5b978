"""The interface of a compiled model that captures use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from piecegraph.compiler.building.ready import Parts


class CapturableModel(ABC):
    """A compiled model as `piecegraph.capture` sees it; `CompiledModel` is the one there is.

    The entry point `CompiledModel` offers `capture`, and capturing asks for compiled models: both know this class, so
    that neither imports the other.
    """

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled pieces. Raises `InputMismatch` for arguments that do not fit what was traced."""

    @abstractmethod
    def parts(self, args: Sequence[Any]) -> Parts:
        """Return the stitched module taken apart over `args`. Raises `InputMismatch` as a call would."""

    @abstractmethod
    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return every parameter, buffer and constant that the pieces read, by name."""
