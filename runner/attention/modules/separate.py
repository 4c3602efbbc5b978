"""Attention of three projections and nothing between these and the products, as XGLM and MegatronBERT have it.

Modules of many classes have the same parts and compute something else, such as a sparse attention. So the code of a
class is called once with small numbers, and its result compared with plain attention.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from piecegraph.runner.attention.modules.attend import attend
from piecegraph.runner.attention.modules.rotary_pairs import turned

_WITH_OUTPUT = ("q_proj", "k_proj", "v_proj", "out_proj")
_WITHOUT_OUTPUT = ("query", "key", "value")
_HEADS, _DIM, _NUM_TOKENS = 2, 4, 5
"""The sizes of the small copy of a module."""


class SeparateAttention(nn.Module):
    """The module of XGLM and MVP, a decoder's; an instance is a module of transformers with this class."""

    def forward(self, hidden_states: torch.Tensor, *args: None, **kwargs: object) -> tuple[torch.Tensor, None]:
        """Return the output `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None."""
        this: Any = self
        query, key, value = (
            project(hidden_states).view(1, -1, this.num_heads, this.head_dim).transpose(1, 2)
            for project in (this.q_proj, this.k_proj, this.v_proj)
        )
        output: torch.Tensor = this.out_proj(attend(self, query, key, value, scaling=this.scaling).flatten(2))
        return output, None


class CausalOrNot(nn.Module):
    """The base of modules that are causal if they are a decoder's and the model's code makes a causal mask."""

    @staticmethod
    def take_over(module: Any) -> None:
        """Let the module say whether it is causal."""
        makes_mask = hasattr(sys.modules[type(module).__module__], "create_causal_mask")
        module.is_causal = makes_mask and bool(module.is_decoder)


class SelfAttention(CausalOrNot):
    """The module of MegatronBERT and RemBERT, whose output projection is in the module around it."""

    def forward(self, hidden_states: torch.Tensor, *args: None, **kwargs: object) -> tuple[torch.Tensor, None]:
        """Return the attention `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None."""
        this: Any = self
        query, key, value = (each.transpose(1, 2) for each in _projected(this, hidden_states))
        return attend(self, query, key, value, scaling=this.attention_head_size**-0.5).flatten(2), None


class RotarySelfAttention(CausalOrNot):
    """The module of RoFormer, which turns pairs of adjacent numbers of queries, keys and perhaps values."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        sinusoidal_pos: torch.Tensor | None = None,
        *args: None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention `[1, num_tokens, hidden_size]` for `hidden_states` of the same shape, and None.

        `sinusoidal_pos` `[1, 1, num_tokens, head_dim]`: sines, then cosines.
        """
        this: Any = self
        assert sinusoidal_pos is not None, "the model hands on no rotary embedding"
        sin, cos = sinusoidal_pos.squeeze(0).unsqueeze(2).chunk(2, dim=-1)
        query, key, value = _projected(this, hidden_states)
        query, key = (turned(each, sin, cos, this.attention_head_size) for each in (query, key))
        if this.rotary_value:
            value = turned(value, sin, cos, this.attention_head_size)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return attend(self, query, key, value, scaling=this.attention_head_size**-0.5).flatten(2), None


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return query, key and value `[1, num_tokens, num_heads, head_dim]`."""
    shape = (1, -1, module.num_attention_heads, module.attention_head_size)
    return tuple(project(hidden).view(shape) for project in (module.query, module.key, module.value))


def replacement(module: Any) -> type[nn.Module] | None:
    """Return the class whose forward computes what `module` computes; None if its structure or its code differs."""
    kind: Any = type(module)
    if module._parameters or module._buffers or hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return None
    parts = set(module._modules)
    if parts == set(_WITH_OUTPUT):
        dim = getattr(module, "head_dim", None)
        is_alike = _has_widths(module, _WITH_OUTPUT[:3], getattr(module, "num_heads", None), dim)
        is_alike = is_alike and module.out_proj.in_features == module.q_proj.out_features
        is_alike = is_alike and getattr(module, "is_decoder", None) is True and abs(module.scaling**-2 - dim) < 1e-6
        return SeparateAttention if is_alike and _is_plain(kind, _WITH_OUTPUT) else None
    if parts == {*_WITHOUT_OUTPUT, "dropout"} and isinstance(getattr(module, "is_decoder", None), bool):
        heads, dim = getattr(module, "num_attention_heads", None), getattr(module, "attention_head_size", None)
        if not _has_widths(module, _WITHOUT_OUTPUT, heads, dim) or not _is_plain(kind, _WITHOUT_OUTPUT):
            return None
        return RotarySelfAttention if hasattr(module, "rotary_value") else SelfAttention
    return None


def _has_widths(module: Any, names: tuple[str, ...], heads: Any, dim: Any) -> bool:
    if not isinstance(heads, int) or not isinstance(dim, int):
        return False
    return all(getattr(getattr(module, name), "out_features", 0) == heads * dim for name in names)


@functools.cache
def _is_plain(kind: Any, names: tuple[str, ...]) -> bool:
    """Return whether the forward of a class computes what its replacement does, by calling it with small numbers."""
    size = _HEADS * _DIM
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    with torch.device("cpu"), torch.no_grad():
        small = _small(kind, names, size, random)
        hidden, table = random(1, _NUM_TOKENS, size), random(1, 1, _NUM_TOKENS, _DIM)
        options = {"sinusoidal_pos": table} if hasattr(kind, "apply_rotary_position_embeddings") else {}
        try:
            found = kind.forward(small, hidden, **options)[0]
        except Exception:  # code that is not known may raise anything
            return False
        query, key, value = (getattr(small, name)(hidden).view(1, _NUM_TOKENS, _HEADS, _DIM) for name in names[:3])
        if options:
            sin, cos = table.squeeze(0).unsqueeze(2).chunk(2, dim=-1)
            query, key = (turned(each, sin, cos, _DIM) for each in (query, key))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        weights = (query @ key.transpose(2, 3) * _DIM**-0.5).softmax(-1)
        wanted = (weights @ value).transpose(1, 2).flatten(2)
        wanted = small.out_proj(wanted) if names == _WITH_OUTPUT else wanted
    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted)


def _small(kind: Any, names: tuple[str, ...], size: int, random: Any) -> Any:
    """Return a module of class `kind` with small projections of float64, in eval mode."""
    small: Any = kind.__new__(kind)
    nn.Module.__init__(small)
    for name in names:
        linear = nn.Linear(size, size, dtype=torch.float64)
        linear.weight.copy_(random(size, size))
        linear.bias.copy_(random(size))
        setattr(small, name, linear)
    small.dropout = 0.0 if names == _WITH_OUTPUT else nn.Dropout(0.0)
    small.embed_dim = small.all_head_size = size
    small.num_heads = small.num_attention_heads = _HEADS
    small.head_dim = small.attention_head_size = _DIM
    small.scaling = _DIM**-0.5
    small.layer_idx, small.is_decoder, small.rotary_value = 0, True, False
    return small.eval()
