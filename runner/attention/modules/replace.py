"""The replacement of the forward of attention modules that compute attention themselves, by kind of module.

Such a module has products, masks and a softmax in its forward, where others call transformers' attention interface. It
gets a class of ours, whose forward calls our op; its parameters, its submodules and all code around it stay as they
are. The kind is chosen by structure (submodules, buffers, sizes), never by the model's name, and among classes of
transformers alone. Modules of other classes are lifted (`runner/attention/lifting`). A module that differs from every
kind stays as it is, so that the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.interface.transformers_attention import ATTENTION_IMPLEMENTATION
from piecegraph.runner.attention.lifting import called
from piecegraph.runner.attention.modules import (
    by_value,
    clipped,
    differential,
    local,
    merged,
    rotary_pairs,
    separate,
    transposed,
)
from piecegraph.runner.attention.modules.attend import POOLS_ATTRIBUTE
from piecegraph.runner.attention.varlen.transformers_varlen import VARLEN_IMPLEMENTATION

KINDS: tuple[Callable[[Any], type[nn.Module] | None], ...] = (
    rotary_pairs.replacement,
    local.replacement,
    merged.replacement,
    clipped.replacement,
    differential.replacement,
    separate.replacement,
    transposed.replacement,
    by_value.replacement,
)
"""The functions that recognise a kind of module."""

WITHOUT_INTERFACE = "eager"
"""The `attn_implementation` under which models whose modules are replaced are constructed: their classes know no
other."""


WITH_EMPTY_MASK = "piecegraph_with_empty_mask"
"""The `attn_implementation` of a model whose code around its modules computes with a mask. No module reads it."""


def replace_attention(model: Any, *, pools: bool = False) -> bool:
    """Give each module in `model` that computes attention itself, in a way that is known, the class that calls our op.

    Modules of a model that `pools` attend within each text, without a cache. Returns whether there are any. Modules
    whose class is not one of transformers stay as they are, unless they call torch's attention by name (`called`). The
    config of the model names our attention then, so that transformers makes no mask.
    """
    found: dict[nn.Module, type[nn.Module]] = {}
    for module in model.modules():
        if type(module).__module__.startswith("transformers."):
            kind = next(filter(None, (kind(module) for kind in KINDS)), None)
        else:
            kind = None if pools else called.replacement(module)
        if kind is not None:
            found[module] = kind
    for module, kind in found.items():
        if hasattr(kind, "take_over"):
            kind.take_over(module)
        module.__class__ = kind
        if pools:
            setattr(module, POOLS_ATTRIBUTE, True)
    if clipped.ClippedAttention in found.values():
        _register_empty_mask()
        model.config._attn_implementation = WITH_EMPTY_MASK
    elif found:
        model.config._attn_implementation = VARLEN_IMPLEMENTATION if pools else ATTENTION_IMPLEMENTATION
    return bool(found)


def sees_later_tokens(model: nn.Module) -> str | None:
    """Return the first module of a decoder whose class is given no causal mask by transformers, and why; else None."""
    for name, module in model.named_modules():
        if isinstance(module, separate.CausalOrNot) and module.is_decoder and not module.is_causal:
            return (
                f"{name} is a decoder's by the config, but the code of transformers around it makes no causal mask, so "
                "that every token of a prompt sees the whole prompt, and none is final before the last; it would need "
                "a causal mask in transformers"
            )
    return None


def unknown_attention(model: nn.Module) -> str:
    """Return the first module of `model` that has heads, and no modules with heads in it, with its parts."""
    for name, module in model.named_modules():
        inner = [child for child in module.modules() if child is not module]
        if _has_heads(module) and not any(map(_has_heads, inner)):
            parts = ", ".join((*module._parameters, *module._buffers, *module._modules))
            return f"{name} ({type(module).__name__}) differs from the kinds that can run here: it has {parts}"
    return "no module with heads was found"


def _has_heads(module: nn.Module) -> bool:
    return any(name in vars(module) for name in ("num_heads", "num_attention_heads", "n_head", "n_heads"))


def has_own_attention(model: nn.Module) -> bool:
    """Return whether attention modules of `model` have a class of ours."""
    return any(type(module).__module__.startswith(__package__) for module in model.modules())


def has_lifted_modules(model: nn.Module) -> bool:
    """Return whether the model's own code of a module runs with our attention."""
    return any(type(module).__module__ == called.__name__ for module in model.modules())


def _register_empty_mask() -> None:
    """Let transformers make masks of one element for models whose config says `WITH_EMPTY_MASK`. Idempotent."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(WITH_EMPTY_MASK, _empty_mask)


def _empty_mask(*args: Any, device: torch.device, **kwargs: object) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.bool, device=device)
