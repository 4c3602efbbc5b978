"""The replacement of the forward of attention modules that compute attention themselves, by kind of module.

Such a module has products, masks and a softmax in its forward, where others call transformers' attention interface. It
gets a class of ours, whose forward calls our op; its parameters, its submodules and all code around it stay as they
are. The kind is chosen by structure (submodules, buffers, sizes), never by the model's name, and among classes of
transformers alone. A module that differs from every kind stays as it is, so that the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from piecegraph.runner.attention.modules import local, rotary_pairs

KINDS: tuple[Callable[[Any], type[nn.Module] | None], ...] = (rotary_pairs.replacement, local.replacement)
"""The functions that recognize a kind of module."""

WITHOUT_INTERFACE = "eager"
"""The `attn_implementation` under which models whose modules are replaced are constructed: their classes know no
other."""


def replace_attention(model: nn.Module) -> bool:
    """Give each module in `model` that computes attention itself, in a way that is known, the class that calls our op.

    Returns whether there are any. Modules whose class is not one of transformers stay as they are.
    """
    found: dict[nn.Module, type[nn.Module]] = {}
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            kind = next(filter(None, (kind(module) for kind in KINDS)), None)
            if kind is not None:
                found[module] = kind
    for module, kind in found.items():
        module.__class__ = kind
    return bool(found)
