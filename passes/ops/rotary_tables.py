"""The op `piecegraph::rotary_tables`: cosines and sines of each token's position at each frequency, halves repeated."""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op


def rotary_tables(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(cos(angle) * scaling, sin(angle) * scaling)`, where `angle = position * inv_freq` is rounded first.

    `positions` is `[num_tokens]` int64, `inv_freq` `[dim / 2]` float32. Both results are new, contiguous and
    `[num_tokens, dim]` of `inv_freq`'s dtype; the columns from `dim / 2` on repeat those before them.
    """
    if positions.is_cuda:
        from piecegraph.passes.kernels.elementwise.rotary_tables import rotary_tables_on_gpu

        return rotary_tables_on_gpu(positions, inv_freq, scaling)
    return rotary_tables_reference(positions, inv_freq, scaling)


def rotary_tables_reference(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel computes, in plain torch: the same bits as models' own calls."""
    angles = (positions[:, None].to(inv_freq.dtype) * inv_freq).repeat(1, 2)
    return angles.cos() * scaling, angles.sin() * scaling


def _table(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[0]))


ROTARY_TABLES = define_op(
    "rotary_tables(Tensor positions, Tensor inv_freq, float scaling) -> (Tensor, Tensor)",
    rotary_tables,
    lambda positions, inv_freq, scaling: (_table(positions, inv_freq), _table(positions, inv_freq)),
)
