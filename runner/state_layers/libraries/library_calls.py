"""Calls of the libraries with our tensors in their layouts, whose results are returned in ours.

What each computes, and of what shapes and dtypes, is that of the torch path: `gated_delta_rule` and `selective_scan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piecegraph.runner.state_layers.libraries.choice import Library
from piecegraph.runner.state_layers.libraries.installed import Function, load_function
from piecegraph.runner.state_layers.libraries.segments import RaggedRows

MAMBA_CHUNK_SIZE = 256
"""The tokens of a chunk in mamba-ssm; the default of its own modules."""


@dataclass(frozen=True, slots=True)
class FlashLinearAttention:
    """`chunk_gated_delta_rule` (https://github.com/fla-org/flash-linear-attention), over packed sequences."""

    function: Function

    def gated_delta_rule(
        self,
        query: torch.Tensor,  # [1, num_rows, num_key_heads, key_dim]; several heads of values share one
        key: torch.Tensor,  # the same
        value: torch.Tensor,  # [1, num_rows, num_heads, value_dim]
        decay: torch.Tensor,  # [1, num_rows, num_heads] float32, logarithms
        beta: torch.Tensor,  # [1, num_rows, num_heads]
        states: torch.Tensor,  # [num_segments, num_heads, key_dim, value_dim] float32
        scale: float,
        rows: RaggedRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result `[1, num_rows, num_heads, value_dim]`, and the state after each segment.

        The library norms query and key to length 1, with the same epsilon as `gated_delta_rule`.
        """
        out, states = self.function(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            scale=scale,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=rows.cu_seqlens,
            chunk_indices=rows.chunk_indices,
        )
        return out, states


@dataclass(frozen=True, slots=True)
class MambaSsm:
    """`mamba_chunk_scan_combined` (https://github.com/state-spaces/mamba), over a padded batch of sequences.

    For texts one after the other (`seq_idx`) the library takes one state, that of the first; so texts are padded to one
    length. A padded token has a time step of 0, with which a state stays as it is.
    """

    function: Function

    def selective_scan(
        self,
        x: torch.Tensor,  # [1, num_rows, num_heads, head_dim]
        dt: torch.Tensor,  # [1, num_rows, num_heads], not negative
        A: torch.Tensor,  # noqa: N803  [num_heads] negative
        B: torch.Tensor,  # noqa: N803  [1, num_rows, num_groups, state_size]
        C: torch.Tensor,  # noqa: N803  the same
        D: torch.Tensor,  # noqa: N803  [num_heads], or [num_heads, head_dim]
        states: torch.Tensor,  # [num_segments, num_heads, head_dim, state_size] float32
        rows: RaggedRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result, of the shape of `x`, and the state after each segment."""
        dt = dt.float()
        if rows.padded is None and len(rows.ranges) > 1:
            return self._one_by_one(x, dt, A, B, C, D, states, rows)
        if rows.padded is not None:
            assert rows.is_row is not None
            x, dt, B, C = (each[0, rows.padded] for each in (x, dt, B, C))  # noqa: N806
            dt = dt * rows.is_row.unsqueeze(-1)
        out, states = self.function(
            x, dt, A.float(), B, C, chunk_size=MAMBA_CHUNK_SIZE, D=D.float(), initial_states=states,
            return_final_states=True,
        )  # fmt: skip
        return (out if rows.unpadded is None else out.flatten(0, 1)[rows.unpadded].unsqueeze(0)), states

    def _one_by_one(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor,  # noqa: N803
        states: torch.Tensor,
        rows: RaggedRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the library for one segment after another, without padding."""
        outs, after, first = [], [], 0
        for number, (start, end) in enumerate(rows.ranges):
            last = first + end - start
            out, state = self.function(
                *(each[:, first:last] for each in (x, dt)), A.float(), *(each[:, first:last] for each in (B, C)),
                chunk_size=MAMBA_CHUNK_SIZE, D=D.float(), initial_states=states[number : number + 1],
                return_final_states=True,
            )  # fmt: skip
            outs.append(out)
            after.append(state)
            first = last
        return torch.cat(outs, 1), torch.cat(after)


LibraryCall = FlashLinearAttention | MambaSsm


def load_library_call(library: Library) -> LibraryCall:
    """Import a library and return what calls it."""
    function = load_function(library)
    return FlashLinearAttention(function) if library is Library.FLA else MambaSsm(function)
