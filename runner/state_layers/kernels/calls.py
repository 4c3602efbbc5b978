"""The launches of a decode step's kernels for layers with states."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import triton

from piecegraph.runner.state_layers.kernels.conv_step import conv_step_kernel
from piecegraph.runner.state_layers.kernels.delta_step import delta_step_kernel
from piecegraph.runner.state_layers.kernels.scan_step import scan_step_kernel

STATE_NUMBERS = 4096
"""The numbers of a state that a program of 4 warps holds in registers: 32 a thread."""


class StepKernel(NamedTuple):
    """A kernel with its grid and arguments."""

    kernel: Any  # a function under `triton.jit`
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def launch(self) -> None:
        """Launch the kernel on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.options)


class StepRows(NamedTuple):
    """The requests of a step, in buffers at fixed addresses."""

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_pages] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64
    idx_mapping: torch.Tensor | None  # [num_reqs] int32; None: no state can be taken back
    prefill_lens: torch.Tensor | None  # [rows] int32
    num_places: int  # of a request's last states; 0: none
    block_size: int
    pages_per_block: int
    has_one_token: bool  # each request, padding aside

    @property
    def num_reqs(self) -> int:
        """The number of requests, padding included."""
        return self.seq_lens.shape[0]

    def pointers(self) -> dict[str, Any]:
        """Return the kernels' arguments."""
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "slot_mapping": self.slot_mapping,
            "idx_mapping": self.idx_mapping,
            "prefill_lens": self.prefill_lens,
        }

    def constants(self) -> Mapping[str, int]:
        """Return the kernels' constants."""
        return {
            "TABLE_STRIDE": self.block_table.stride(0),
            "BLOCK_SIZE": self.block_size,
            "PAGES": self.pages_per_block,
            "NUM_PLACES": self.num_places,
        }


def row_stride(x: torch.Tensor) -> int:
    """Return the distance of rows that are packed; that of one row, which may be anything, is that of several.

    Kernels are compiled for whether it is a multiple of 16, and one kernel serves any number of rows.
    """
    return x.stride(0) if x.shape[0] > 1 else prod(x.shape[1:])


def conv_step(
    x: torch.Tensor,  # [num_tokens, channels], of unit stride
    weight: torch.Tensor,  # [channels, kernel_size]
    bias: torch.Tensor | None,
    out: torch.Tensor,  # [num_tokens, channels], written
    windows: torch.Tensor,  # [num_blocks, channels, kernel_size - 1], written
    places: torch.Tensor | None,  # [num_rows * num_places, channels, kernel_size - 1], written
    rows: StepRows,
    *,
    is_silu: bool,
) -> StepKernel:
    """Return the launch of a convolution; see `causal_conv`. Rows of padding are not written."""
    channels, kernel_size = weight.shape
    block_k = triton.next_power_of_2(kernel_size)
    block_c = max(16, min(1024 // block_k, triton.next_power_of_2(channels)))
    return StepKernel(
        conv_step_kernel,
        (rows.num_reqs, triton.cdiv(channels, block_c)),
        {
            "x": x,
            "weight": weight,
            "bias": bias,
            "out": out,
            "windows": windows,
            "places": places,
            "before": None if rows.has_one_token else windows.new_empty((rows.num_reqs, channels, kernel_size - 1)),
            **rows.pointers(),
            "channels": channels,
            "x_stride": row_stride(x),
            "weight_stride": weight.stride(0),
            "out_stride": row_stride(out),
            "block_stride": windows.stride(0),
            **rows.constants(),
            "KERNEL_SIZE": kernel_size,
            "BLOCK_K": block_k,
            "BLOCK_C": block_c,
            "IS_SILU": is_silu,
        },
        {"num_warps": 4},
    )


def delta_step(
    mixed: torch.Tensor,  # [num_tokens, channels], convolved
    decay: torch.Tensor,  # [num_tokens, num_v_heads], or [..., key_dim]
    beta: torch.Tensor,  # [num_tokens, num_v_heads]
    out: torch.Tensor,  # [num_tokens, num_v_heads, value_dim], written
    states: torch.Tensor,  # [num_blocks, num_v_heads, key_dim, value_dim], written
    places: torch.Tensor | None,  # [num_rows * num_places, num_v_heads, key_dim, value_dim], written
    rows: StepRows,
    *,
    num_k_heads: int,
    scale: float,
    norm_eps: float,
) -> StepKernel:
    """Return the launch of the gated delta rule; see `gated_delta_rule`. Rows of padding are not written."""
    num_v_heads, key_dim, value_dim = states.shape[1:]
    block_k = triton.next_power_of_2(key_dim)
    block_v = max(1, min(STATE_NUMBERS // block_k, triton.next_power_of_2(value_dim)))
    return StepKernel(
        delta_step_kernel,
        (rows.num_reqs, num_v_heads, triton.cdiv(value_dim, block_v)),
        {
            "mixed": mixed,
            "decay": decay,
            "beta": beta,
            "out": out,
            "states": states,
            "places": places,
            **rows.pointers(),
            "num_v_heads": num_v_heads,
            "num_k_heads": num_k_heads,
            "scale": scale,
            "mixed_stride": row_stride(mixed),
            "decay_stride": row_stride(decay),
            "beta_stride": row_stride(beta),
            "out_stride": row_stride(out),
            "block_stride": states.stride(0),
            **rows.constants(),
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "BY_CHANNEL": decay.dim() == 3,
            "NORM_EPS": norm_eps,
        },
        {"num_warps": 4},
    )


def scan_step(
    mixed: torch.Tensor,  # [num_tokens, channels], convolved
    dt: torch.Tensor,  # [num_tokens, num_heads]
    A: torch.Tensor,  # [num_heads], or [num_heads, state_size]
    D: torch.Tensor,  # [num_heads], or [num_heads, head_dim]
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim], written
    states: torch.Tensor,  # [num_blocks, num_heads, head_dim, state_size], written
    places: torch.Tensor | None,  # [num_rows * num_places, num_heads, head_dim, state_size], written
    rows: StepRows,
    *,
    num_groups: int,
) -> StepKernel:
    """Return the launch of a scan; see `selective_scan`. Rows of padding are not written."""
    num_heads, head_dim, state_size = states.shape[1:]
    block_n = triton.next_power_of_2(state_size)
    block_c = max(1, min(STATE_NUMBERS // block_n, triton.next_power_of_2(num_heads * head_dim), 64))
    return StepKernel(
        scan_step_kernel,
        (rows.num_reqs, triton.cdiv(num_heads * head_dim, block_c)),
        {
            "mixed": mixed,
            "dt": dt,
            "A": A.contiguous(),
            "D": D.contiguous(),
            "out": out,
            "states": states,
            "places": places,
            **rows.pointers(),
            "num_heads": num_heads,
            "num_groups": num_groups,
            "mixed_stride": row_stride(mixed),
            "dt_stride": row_stride(dt),
            "out_stride": row_stride(out),
            "block_stride": states.stride(0),
            **rows.constants(),
            "HEAD_DIM": head_dim,
            "STATE_SIZE": state_size,
            "BLOCK_C": block_c,
            "BLOCK_N": block_n,
            "A_BY_STATE": A.dim() == 2,
            "D_BY_CHANNEL": D.dim() == 2,
        },
        {"num_warps": 4},
    )
