"""Multi-head latent attention (https://arxiv.org/abs/2405.04434): one compressed vector of a token serves all heads.

transformers' layers expand the vector of every token to keys and values of all heads and attend over these. Here the
vector is cached as it is. The expansion of keys is absorbed into the query and that of values into the result, so what
runs is attention with one KV head, whose values are the beginning of its keys.

The expansion is a method of its own in transformers, `expand_kv`, which is replaced; all other code of the layer is
traced unchanged. Which layers have it is seen by their structure, and what the method computes by calling it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

_METHOD = "expand_kv"
_SIGN = "kv_a_proj_with_mqa"
"""The submodule by which a layer of this kind is found."""

_OF_KV = frozenset({_SIGN, "kv_a_layernorm", "kv_b_proj"})
_OF_QUERY = frozenset({"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "o_proj"})
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")


class LatentKV:
    """The key of a layer in its compressed form, in place of the keys and values of all heads.

    It is no tensor, so that a model that changes keys or values between their expansion and its attention fails. Nor is
    it a named tuple or a data class: a trace would read their generated code, which no other process could find.
    """

    def __init__(self, latent: torch.Tensor, rope: torch.Tensor) -> None:
        self.latent = latent  # [1, 1, num_tokens, kv_lora_rank]
        self.rope = rope  # [1, 1, num_tokens, qk_rope_head_dim], rotated; shared by all heads


def keep_compressed(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[LatentKV, LatentKV]:
    """Return keys and values as transformers' `expand_kv` does, but not expanded."""
    kv = LatentKV(kv_nope, k_rot)
    return kv, kv


def absorbed_query(query: torch.Tensor, weight: torch.Tensor, num_rope: int) -> torch.Tensor:
    """Return the query `[num_tokens, num_heads, kv_lora_rank + num_rope]` for compressed keys.

    `query` `[num_heads, num_tokens, nope + num_rope]`; `weight` `[num_heads, nope + value_dim, kv_lora_rank]`.
    """
    num_nope = query.shape[2] - num_rope
    nope, rope = query.split([num_nope, num_rope], dim=-1)
    return torch.cat([nope @ weight[:, :num_nope], rope], dim=-1).transpose(0, 1)


def expanded_values(out: torch.Tensor, weight: torch.Tensor, num_nope: int) -> torch.Tensor:
    """Return `[num_tokens, num_heads, value_dim]` for `out` `[num_tokens, num_heads, kv_lora_rank]`."""
    return (out.transpose(0, 1) @ weight[:, num_nope:].transpose(1, 2)).transpose(0, 1)


def keep_latents(model: nn.Module) -> tuple[str | None, tuple[str, ...]]:
    """Let each layer with latent attention keep its compressed vectors.

    Returns why that is not possible, or None, and the notes for the caller.
    """
    layers = [(name, module) for name, module in model.named_modules() if _SIGN in module._modules]
    for name, module in layers:
        difference = _difference(module)
        if difference is not None:
            return (
                f"{name} ({type(module).__name__}) compresses keys and values, and differs from the layers with latent "
                f"attention that can run here: {difference}. It would need to expand them as those do, so that they "
                "can be kept as they are."
            ), ()
    kept = [module for _, module in layers if hasattr(type(module), _METHOD)]
    for module in kept:
        vars(module)[_METHOD] = keep_compressed
    return None, _notes(kept, len(layers) - len(kept))


def _difference(module: Any) -> str | None:
    """Return what tells `module` from the layers that are known, or None."""
    more = sorted(name for name, child in module._modules.items() if child is not None)
    more = [name for name in more if name not in _OF_KV | _OF_QUERY]
    if more:
        return f"it has {', '.join(more)}"
    missing = sorted(name for name in _OF_KV if module._modules.get(name) is None)
    missing += [name for name in _SIZES if not isinstance(getattr(module, name, None), int)]
    if missing:
        return f"it has no {', '.join(missing)}"
    rank, nope, rope, value, heads = (getattr(module, name) for name in _SIZES)
    up, down = module.kv_b_proj, module.kv_a_proj_with_mqa
    if type(up) is not nn.Linear or up.bias is not None or up.weight.shape != (heads * (nope + value), rank):
        return f"kv_b_proj is {up}, not a linear layer from {rank} to {heads * (nope + value)} without bias"
    if getattr(down, "out_features", None) != rank + rope:
        return f"{_SIGN} gives {getattr(down, 'out_features', '?')} numbers, not {rank + rope}"
    if hasattr(type(module), _METHOD) and not _expands_as_known(type(module)):
        return f"its {_METHOD} computes something else"
    return None


def _expands_as_known(kind: Any) -> bool:
    """Return whether the class's `expand_kv` computes what is absorbed here, by calling it with small numbers."""
    heads, nope, rope, value, rank, num_tokens = 2, 3, 4, 5, 6, 7
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    weight, latent, rotated = random(heads * (nope + value), rank), random(1, 1, num_tokens, rank), random(1, 1, 7, 4)
    layer = SimpleNamespace(
        kv_b_proj=lambda x: nn.functional.linear(x, weight), kv_lora_rank=rank, qk_nope_head_dim=nope,
        qk_rope_head_dim=rope, qk_head_dim=nope + rope, v_head_dim=value, num_heads=heads,
    )  # fmt: skip
    try:
        with torch.device("cpu"):
            key, values = kind.expand_kv(layer, latent, rotated)
    except Exception:  # code that is not known may raise anything
        return False
    expanded = (latent[0] @ weight.mT).view(num_tokens, heads, nope + value).transpose(0, 1).unsqueeze(0)
    keys = torch.cat([expanded[..., :nope], rotated.expand(-1, heads, -1, -1)], dim=-1)
    return (
        (key.shape, values.shape) == (keys.shape, expanded[..., nope:].shape)
        and torch.allclose(key, keys)
        and torch.allclose(values, expanded[..., nope:])
    )


def _notes(kept: list[Any], num_expanded: int) -> tuple[str, ...]:
    notes = []
    if kept:
        rank, nope, rope, value, heads = (getattr(kept[0], name) for name in _SIZES)
        ours, expanded = rank + rope, heads * (nope + rope + value)
        notes.append(
            f"latent attention: in each of {len(kept)} layers a token takes {ours} numbers, where the keys and values "
            f"of {heads} heads are {expanded}: {ours / expanded:.1%}"
        )
    if num_expanded:
        notes.append(
            f"latent attention: {num_expanded} of the layers keep the keys and values of all heads, since their class "
            f"has no {_METHOD}"
        )
    return tuple(notes)
