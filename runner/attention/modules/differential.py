"""Differential attention (https://arxiv.org/abs/2410.05258), as DiffLlama has it: one softmax less a share of another.

transformers attends twice, over the same keys and each half of the value heads. A cache keeps one value of a token, so
here one attention has both halves as the two halves of each value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.modules.attend import attend

_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_SHARES = frozenset({"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"})


class DifferentialAttention(nn.Module):
    """The forward of such a module on a flattened batch; an instance is a module of transformers with this class."""

    @staticmethod
    def take_over(module: Any) -> None:
        """Turn the number in which layers differ into a buffer, so that they are alike."""
        first = torch.tensor(vars(module).pop("lambda_init"), dtype=torch.float32, device="cpu")
        module.register_buffer("first_share", first, persistent=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None.

        `position_embeddings`: cosines and sines `[1, num_tokens, head_dim]`.
        """
        this: Any = self
        shape = (*hidden_states.shape[:-1], -1, this.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (this.q_proj, this.k_proj, this.v_proj)
        )
        assert position_embeddings is not None, "the model hands on no rotary embedding"
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)
        query, key = ((each * cos) + (_half_turned(each) * sin) for each in (query, key))
        value = torch.cat(torch.chunk(value, 2, dim=1), dim=-1).repeat(1, 2, 1, 1)
        for cache in ("past_key_values", "cache"):  # transformers renamed the argument
            kwargs.pop(cache, None)
        out = attend(self, query, key, value, scaling=this.scaling, **kwargs)
        one, other = torch.chunk(out, 2, dim=2)
        first, second = (
            torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(query.dtype)
            for q, k in ((this.lambda_q1, this.lambda_k1), (this.lambda_q2, this.lambda_k2))
        )
        difference = (one - (first - second + this.first_share) * other).float()
        scale = torch.rsqrt(difference.square().mean(-1, keepdim=True) + this.groupnorm.eps)  # rms_norm asks for sizes
        normed = (1 - this.first_share) * difference * scale
        output: torch.Tensor = this.o_proj(normed.to(query.dtype).flatten(2))
        return output, None


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure differs."""
    if set(module._modules) != {*_PROJECTIONS, "groupnorm"} or set(module._parameters) != _SHARES or module._buffers:
        return None
    dim = getattr(module, "head_dim", None)
    if not isinstance(dim, int) or not isinstance(getattr(module, "lambda_init", None), float):
        return None
    heads, norm = module.v_proj.out_features // dim, module.groupnorm
    if type(norm) is not nn.RMSNorm or norm.elementwise_affine or norm.eps is None:
        return None
    is_alike = heads % 2 == 0 and module.k_proj.out_features == heads * dim == module.v_proj.out_features
    return DifferentialAttention if is_alike else None
