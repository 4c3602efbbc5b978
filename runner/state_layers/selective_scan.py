"""The scan of state-space layers: Mamba (https://arxiv.org/abs/2312.00752) and Mamba-2 (https://arxiv.org/abs/2405.21060).

A state of a head is `[head_dim, state_size]`. A token changes it to `exp(dt A) h + dt x B^T` and reads `h C + D x`.
Computed in float32.
"""

from __future__ import annotations

import torch

CHUNK_SIZE = 64
"""The tokens of Mamba-2 that are computed by matrix products at a time."""


def selective_scan(
    x: torch.Tensor,  # [batch, num_tokens, num_heads, head_dim]
    dt: torch.Tensor,  # [batch, num_tokens, num_heads], not negative
    A: torch.Tensor,  # noqa: N803  [num_heads], or [num_heads, state_size]; negative
    B: torch.Tensor,  # noqa: N803  [batch, num_tokens, num_groups, state_size]; a group serves adjacent heads
    C: torch.Tensor,  # noqa: N803  the same
    D: torch.Tensor,  # noqa: N803  [num_heads], or [num_heads, head_dim]
    state: torch.Tensor,  # [batch, num_heads, head_dim, state_size] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, of the shape of `x` and float32, and the state after the last token."""
    x, dt, A, B, C = x.float(), dt.float(), A.float(), B.float(), C.float()  # noqa: N806
    heads = x.shape[2] // B.shape[2]
    B, C = (each.repeat_interleave(heads, dim=2) if heads > 1 else each for each in (B, C))  # noqa: N806
    scan = _by_chunks if A.dim() == 1 and x.shape[1] > 1 else _by_tokens
    out, state = scan(x, dt, A, B, C, state)
    skip = D.float() if D.dim() == 2 else D.float().unsqueeze(-1)
    return out + x * skip, state


def _by_tokens(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    rates = A.unsqueeze(-1) if A.dim() == 1 else A  # [num_heads, 1 or state_size]
    outs = []
    for token in range(x.shape[1]):
        step = dt[:, token].unsqueeze(-1)  # [batch, num_heads, 1]
        kept = (step * rates).exp().unsqueeze(2)
        state = state * kept + (step * x[:, token]).unsqueeze(-1) * B[:, token].unsqueeze(2)
        outs.append((state @ C[:, token].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outs, dim=1), state


def _by_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    for first in range(0, x.shape[1], CHUNK_SIZE):
        chunk = slice(first, first + CHUNK_SIZE)
        b, c, scaled = (
            each.transpose(1, 2) for each in (B[:, chunk], C[:, chunk], x[:, chunk] * dt[:, chunk, :, None])
        )
        since_start = (dt[:, chunk] * A).cumsum(1).transpose(1, 2)  # [batch, num_heads, chunk]
        between = (since_start.unsqueeze(-1) - since_start.unsqueeze(-2)).clamp(max=0.0).exp().tril()
        within = ((c @ b.transpose(-1, -2)) * between) @ scaled
        before = (c * since_start.exp().unsqueeze(-1)) @ state.transpose(-1, -2)
        outs.append((within + before).transpose(1, 2))
        last = since_start[..., -1:]
        new = (scaled * (last - since_start).exp().unsqueeze(-1)).transpose(-1, -2) @ b
        state = state * last.exp().unsqueeze(-1) + new
    return torch.cat(outs, dim=1), state
