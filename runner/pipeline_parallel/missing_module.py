"""`MissingModule`, which stands for a module that another rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MissingModule(nn.Module):
    """A module without parameters that returns its first input; it keeps the plain attributes of what it stands for.

    The code of a model may read such an attribute, the kind of a layer for one, before it calls the layer. `name` is
    the module's, by which no two are alike: layers that are alike are traced together, and these are no layers.
    """

    def __init__(self, stands_for: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        for key, value in vars(stands_for).items():
            if key not in ("training", "name") and type(value) in (bool, int, float, str):
                setattr(self, key, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `hidden_states`."""
        return hidden_states
