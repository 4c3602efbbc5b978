"""Attention with a bias by the value of each key, as Doge has it; a query sees the keys of the largest biases.

How many keys it sees is a size of the module. Texts up to that size are attended to whole, and only these run here
(`most_tokens`). A bias of a key is one more number of the key, by which one more number of the query is multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from piecegraph.runner.attention.modules.attend import attend

_PARTS = frozenset({"q_proj", "k_proj", "v_proj", "dt_proj", "o_proj", "q_norm", "k_norm"})


class ValueBiasedAttention(nn.Module):
    """The forward of such a module on a flattened batch; an instance is a module of transformers with this class."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *args: None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None.

        `position_embeddings`: cosines and sines `[1, num_tokens, head_dim]`.
        """
        this: Any = self
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, this.head_dim))
            for project in (this.q_proj, this.k_proj, this.v_proj)
        )
        cos, sin = (each.unsqueeze(2) for each in position_embeddings)
        query, key = ((each * cos) + (_half_turned(each) * sin) for each in (this.q_norm(query), this.k_norm(key)))
        bias = torch.exp(this.A * F.softplus(this.dt_proj(value.flatten(2))))
        key = torch.cat((key, bias.unsqueeze(-1)), dim=-1)
        query = torch.cat((query, torch.full_like(query[..., :1], 1.0 / this.scaling)), dim=-1)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        window = getattr(this.config, "sliding_window", None)
        out = attend(self, query, key, value, scaling=this.scaling, sliding_window=window)
        output: torch.Tensor = this.o_proj(out.flatten(2))
        return output, None


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def most_tokens(model: nn.Module) -> int | None:
    """Return the tokens of the longest text that modules of `model` attend to whole; None: of any length."""
    found = [int(each.keep_window_size) for each in model.modules() if isinstance(each, ValueBiasedAttention)]  # type: ignore[arg-type]
    return min(found, default=None)


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._modules) != _PARTS or set(module._parameters) != {"A"} or module._buffers:
        return None
    dim = getattr(module, "head_dim", None)
    if not isinstance(dim, int) or not isinstance(getattr(module, "keep_window_size", None), int):
        return None
    heads = module.A.shape[0]
    is_alike = module.k_proj.out_features == module.v_proj.out_features == heads * dim
    is_alike = is_alike and (module.dt_proj.in_features, module.dt_proj.out_features) == (heads * dim, heads)
    is_alike = is_alike and module.q_proj.out_features % (heads * dim) == 0 and module.scaling == dim**-0.5
    return ValueBiasedAttention if is_alike and hasattr(type(module), "prepare_dynamic_mask") else None
