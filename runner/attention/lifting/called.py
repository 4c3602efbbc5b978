"""Modules of a model's own code that call `F.scaled_dot_product_attention`: each such call becomes our op.

The module's forward runs unchanged, in a mode in which that function is ours. A call that is causal and has no mask
runs; what else it passes is refused by name when the trace is read, as in transformers' interface.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # its usual name
from torch.overrides import TorchFunctionMode

from piecegraph.runner.attention.interface.transformers_attention import transformers_attention

_FUNCTION = F.scaled_dot_product_attention.__name__


def replacement(module: nn.Module) -> type[nn.Module] | None:
    """Return a class that runs `module` with our attention, or None if its forward does not call torch's by name."""
    code = getattr(type(module).forward, "__code__", None)
    kind: Any = type(module)
    return _lifting(kind) if code is not None and _FUNCTION in code.co_names else None


@functools.cache
def _lifting(kind: Any) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward runs in `WithOurAttention`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with WithOurAttention(self):
            return kind.forward(self, *args, **kwargs)

    return type(f"Lifted{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})


class WithOurAttention(TorchFunctionMode):
    """A mode in which `F.scaled_dot_product_attention` calls our op, as the layer that `module` is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or our op."""
        if func is F.scaled_dot_product_attention:
            return _attend(self.module, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_q_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return what torch's function of these arguments returns, `[1, num_q_heads, num_tokens, value_dim]`.

    The first dim may be absent, as in torch. Query heads share keys, whether `enable_gqa` says so or not: torch refuses
    a call that should say so and does not.
    """
    others: dict[str, Any] = (
        {"keys of no token": True} if query.shape[-2] != key.shape[-2] else {}
    )  # refused, as what is not known
    has_batch = query.dim() == 4
    if not has_batch:
        query, key, value = (each.unsqueeze(0) for each in (query, key, value))
    out, _ = transformers_attention(
        module, query, key, value, attn_mask, scaling=scale, dropout=dropout_p, is_causal=is_causal, **others
    )
    out = out.transpose(1, 2)
    return out if has_batch else out.squeeze(0)
