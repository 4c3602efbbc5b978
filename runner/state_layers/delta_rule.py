"""The gated delta rule (https://arxiv.org/abs/2412.06464): linear attention whose state forgets, and corrects itself.

A state `S` of a head maps keys to values. A token with decay `g` (a logarithm, at most 0) and rate `b` changes it to
`S' = exp(g) S`, `S' + k (b (v - k^T S'))^T`, and reads `q^T S`. Computed in float32.
"""

from __future__ import annotations

import torch

CHUNK_SIZE = 64
"""The tokens that are computed by matrix products at a time, as in transformers."""

NORM_EPS = 1e-6


def gated_delta_rule(
    query: torch.Tensor,  # [batch, num_tokens, num_heads, key_dim]
    key: torch.Tensor,  # the same
    value: torch.Tensor,  # [batch, num_tokens, num_heads, value_dim]
    decay: torch.Tensor,  # [batch, num_tokens, num_heads], or [..., key_dim]: of each row of the state
    beta: torch.Tensor,  # [batch, num_tokens, num_heads]
    state: torch.Tensor,  # [batch, num_heads, key_dim, value_dim] float32
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result `[batch, num_tokens, num_heads, value_dim]` float32, and the state after the last token.

    Query and key are normed to length 1 first.
    """
    query, key = _normed(query) * scale, _normed(key)
    query, key, value, beta, decay = (each.float().transpose(1, 2) for each in (query, key, value, beta, decay))
    if decay.dim() == 3:
        decay = decay.unsqueeze(-1)  # [batch, num_heads, num_tokens, 1 or key_dim]
    if query.shape[2] == 1:
        out, state = _one_token(query, key, value, decay, beta, state)
    else:
        outs = []
        for first in range(0, query.shape[2], CHUNK_SIZE):
            q, k, v, d, b = (each[:, :, first : first + CHUNK_SIZE] for each in (query, key, value, decay, beta))
            out, state = _chunk(q, k, v, d, b, state)
            outs.append(out)
        out = torch.cat(outs, dim=2)
    return out.transpose(1, 2), state


def _normed(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _one_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token by the rule itself."""
    state = state * decay[:, :, 0].exp().unsqueeze(-1)
    known = key @ state  # [batch, num_heads, 1, value_dim]
    state = state + key.transpose(-1, -2) @ ((value - known) * beta.unsqueeze(-1))
    return query @ state, state


def _chunk(
    query: torch.Tensor,  # [batch, num_heads, chunk, key_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,  # [batch, num_heads, chunk, 1 or key_dim]
    beta: torch.Tensor,  # [batch, num_heads, chunk]
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tokens of a chunk together.

    The corrections of the tokens depend on those before them in the chunk: they solve a triangular system.
    """
    since_start = decay.cumsum(2)
    scores, similar = _decayed(query, key, since_start), _decayed(key, key, since_start)
    system = similar.tril(-1) * beta.unsqueeze(-1)
    known = (key * since_start.exp()) @ state
    right = (value - known) * beta.unsqueeze(-1)
    corrections = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (query * since_start.exp()) @ state + scores.tril() @ corrections
    last = since_start[:, :, -1:]
    state = state * last.transpose(-1, -2).exp() + (key * (last - since_start).exp()).transpose(-1, -2) @ corrections
    return out, state


def _decayed(left: torch.Tensor, right: torch.Tensor, since_start: torch.Tensor) -> torch.Tensor:
    """Return `[batch, num_heads, chunk, chunk]` products of each row of `left` with each decayed row of `right`.

    Entries above the diagonal are not meant to be read.
    """
    if since_start.shape[-1] == 1:
        between = since_start - since_start.transpose(-1, -2)
        return (left @ right.transpose(-1, -2)) * between.clamp(max=0.0).exp()
    between = since_start.unsqueeze(3) - since_start.unsqueeze(2)  # [..., chunk, chunk, key_dim]
    return (left.unsqueeze(3) * right.unsqueeze(2) * between.clamp(max=0.0).exp()).sum(-1)
