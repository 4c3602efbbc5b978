"""The compiled models that run while a step is captured, whose weights the graphs read at fixed addresses.

A FULL step is any callable, so the models that it calls are known only from their calls. The collection is ambient for
that reason: `capture` sets it for the duration of a capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from piecegraph.compiler.building.bound_weights import BoundWeights


class CapturedModel(Protocol):
    """The view of a compiled model that graphs need."""

    @property
    def weights(self) -> BoundWeights:
        """The weights of its module, which the user may replace."""

    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return every tensor that its pieces read, by name."""


_models: ContextVar[dict[int, CapturedModel] | None] = ContextVar("captured_models", default=None)


@contextmanager
def collecting_models(models: dict[int, CapturedModel]) -> Iterator[None]:
    """Add every model that runs inside this block to `models`, by id."""
    token = _models.set(models)
    try:
        yield
    finally:
        _models.reset(token)


def add_running_model(model: CapturedModel) -> None:
    """Add `model` to the models of the current capture; do nothing outside a capture."""
    models = _models.get()
    if models is not None:
        models[id(model)] = model
