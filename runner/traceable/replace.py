"""The replacement of the forward of modules whose code is no graph, and computes what a graph can compute.

Such a module gets a class of ours; its parameters, its submodules and all code around it stay as they are. The kind is
chosen by structure, never by the model's name, and among classes of transformers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from piecegraph.runner.traceable import experts, tables

KINDS: tuple[Callable[[Any], type[nn.Module] | None], ...] = (experts.replacement, tables.replacement)
"""The functions that recognise a kind of module."""


def make_traceable(model: nn.Module) -> None:
    """Give each module in `model` of a known kind its class. A model without such modules stays as it is."""
    for module in list(model.modules()):
        if type(module).__module__.startswith("transformers."):
            kind = next(filter(None, (kind(module) for kind in KINDS)), None)
            if kind is not None:
                module.__class__ = kind
