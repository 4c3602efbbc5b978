"""How a module says which one of many it is."""

from __future__ import annotations

from torch import nn

NAME_ATTRIBUTE = "_piecegraph_layer"
"""What holds a module's name in its model. Code that is traced may hand it to an op, and nothing else."""


def name_layers(model: nn.Module) -> None:
    """Tell every module its name in `model`."""
    for name, module in model.named_modules():
        setattr(module, NAME_ATTRIBUTE, name)
