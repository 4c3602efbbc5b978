"""The replacement of the forward of layers with states, by kind of layer.

transformers has no hook for them: a layer calls its convolution and its scan directly. So such a module gets a class of
ours, whose forward calls our ops; its parameters, its submodules and all code around it stay as they are. The kind is
chosen by structure (submodules, parameters, shapes), never by the model's name, and a module that differs from every
kind stays as it is, so that the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from piecegraph.runner.state_layers.modules import gated_delta_net, lightning, mamba, mamba2, short_conv

KINDS: tuple[Callable[[Any], type[nn.Module] | None], ...] = (
    gated_delta_net.replacement,
    mamba2.replacement,
    mamba.replacement,
    short_conv.replacement,
    lightning.replacement,
)
"""The functions that recognise a kind of layer."""


def replace_state_layers(model: nn.Module) -> str | None:
    """Give each module in `model` that keeps a state the class that runs it.

    Returns why that is not possible, or None. A module keeps a state if it has a convolution over tokens or decay rates
    of a state; a model without such modules stays as it is.
    """
    found: dict[nn.Module, type[nn.Module]] = {}
    inner: set[nn.Module] = set()  # modules in those found
    for name, module in model.named_modules():
        if module in inner or not _keeps_state(module):
            continue
        kind = next(filter(None, (kind(module) for kind in KINDS)), None)
        if kind is None:
            parts = ", ".join((*module._parameters, *module._buffers, *module._modules))
            return (
                f"{name} ({type(module).__name__}) keeps a state between tokens, and differs from the layers with "
                f"states that can run here; it would need a class for its kind in runner/state_layers/modules, and an "
                f"op for its scan. It has {parts}."
            )
        found[module] = kind
        inner.update(module.modules())
    for module, kind in found.items():
        module.__class__ = kind
    return None


_DECAY = frozenset({"slope_rate", "query_decay", "key_decay"})
"""The buffers of linear attention whose state decays by a fixed rate."""


def _keeps_state(module: nn.Module) -> bool:
    convolutions = [child for child in module._modules.values() if isinstance(child, nn.Conv1d)]
    if "A_log" in module._parameters or set(module._buffers) >= _DECAY:
        return True
    return any(each.kernel_size != (1,) for each in convolutions)


def has_state_layers(model: nn.Module) -> bool:
    """Return whether modules of `model` have a class of ours."""
    return any(type(module).__module__.startswith(__package__) for module in model.modules())


def first_state_layer(model: nn.Module) -> str | None:
    """Return the name of the first module in `model` that keeps a state, or None."""
    return next((name for name, module in model.named_modules() if _keeps_state(module)), None)
