"""Attention with linear biases (https://arxiv.org/abs/2108.12409): the slopes of a module's heads.

transformers makes a table of biases in a function beside the module's class. The slopes are what the function returns
for the second of two positions, and a longer table shows that they are slopes: products in float32 with the position,
or with the distance to the last key, which gives the same weights; or products that are rounded to bfloat16.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

_FROM_THE_FIRST = "build_alibi_tensor"
"""The function that counts from the first position, given a mask of all tokens (BLOOM, Falcon)."""

_FROM_THE_LAST = "build_mpt_alibi_tensor"
"""The function that counts from the last position, given their number (MPT)."""

_CHECKED = 2048
"""The positions for which a table must be what its slopes give."""


class AlibiAttention(nn.Module):
    """The base of the classes with `alibi_slopes`, a buffer `[num_heads]` that is not saved."""

    @staticmethod
    def take_over(module: Any) -> None:
        """Give a module of transformers the buffer, by the code of its class."""
        slopes = alibi_slopes(module, module.n_heads if hasattr(module, "n_heads") else module.num_heads)
        assert slopes is not None, "a class with slopes was chosen by them"
        module.register_buffer("alibi_slopes", slopes.clone(), persistent=False)


def alibi_slopes(module: Any, num_heads: int) -> torch.Tensor | None:
    """Return the slopes `[num_heads]`, float32 or bfloat16, by the code of a module's class; None if it has others."""
    return _slopes(type(module).__module__, num_heads)


@functools.cache
def _slopes(source: str, num_heads: int) -> torch.Tensor | None:
    with torch.device("cpu"), torch.no_grad():
        short, long = _table(source, num_heads, 2), _table(source, num_heads, _CHECKED)
        if short is None or long is None:
            return None
        positions = torch.arange(_CHECKED)
        slopes = short[:, 1] - short[:, 0]
        long = long - long[:, :1]
        if torch.allclose(slopes[:, None] * positions, long, rtol=0.0, atol=1e-6 * float(long.abs().max())):
            return slopes
        rounded = slopes.to(torch.bfloat16)
        return rounded if torch.equal((rounded[:, None] * positions).float(), long) else None


def _table(source: str, num_heads: int, num_positions: int) -> torch.Tensor | None:
    """Return the biases `[num_heads, num_positions]` float32 that code of transformers makes, or None."""
    code = sys.modules[source]
    if hasattr(code, _FROM_THE_FIRST):
        table = code.build_alibi_tensor(torch.ones(1, num_positions, dtype=torch.long), num_heads, torch.float32)
    elif hasattr(code, _FROM_THE_LAST):
        table = code.build_mpt_alibi_tensor(num_heads, num_positions)
    else:
        return None
    return table.reshape(num_heads, num_positions) if table.numel() == num_heads * num_positions else None


def adds_position_bias(model: nn.Module) -> bool:
    """Return whether attention of `model` was replaced by one with biases."""
    return any(isinstance(module, AlibiAttention) for module in model.modules())
