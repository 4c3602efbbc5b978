"""`piecegraph::rotary_tables`: cosines and sines of each token's position at each frequency, halves repeated."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`(cos(angle) * scaling, sin(angle) * scaling)` with `angle = position * inv_freq`, rounded before its cosine.

    `positions` is `[num_tokens]` int64, `inv_freq` `[dim / 2]` float32. Both results are new, contiguous and
    `[num_tokens, dim]` of `inv_freq`'s dtype; columns from `dim / 2` on are those before them again.
    """
    if positions.is_cuda:
        from piecegraph.passes.kernels.rotary_tables import rotary_tables_on_gpu

        return rotary_tables_on_gpu(positions, inv_freq, scaling)
    return rotary_tables_reference(positions, inv_freq, scaling)


def rotary_tables_reference(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel does, in torch: the bits that models' own calls give."""
    angles = (positions[:, None].to(inv_freq.dtype) * inv_freq).repeat(1, 2)
    return angles.cos() * scaling, angles.sin() * scaling


def _table(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[0]))


ROTARY_TABLES = define_op(
    "rotary_tables(Tensor positions, Tensor inv_freq, float scaling) -> (Tensor, Tensor)",
    rotary_tables,
    lambda positions, inv_freq, scaling: (_table(positions, inv_freq), _table(positions, inv_freq)),
)
