"""The requests that compute a few tokens of a step on a GPU: layers with states run as Triton kernels.

The kernels find each request's states in the step's buffers, so a FULL graph holds them. In a step with prompts they
run the requests with one token each, which come first. The torch path (`ops.run_layer`) is their reference, and runs
everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from piecegraph.runner.attention.interface.forward_context import get_forward_context
from piecegraph.runner.state_layers.delta_rule import NORM_EPS
from piecegraph.runner.state_layers.metadata import StateMetadata

if TYPE_CHECKING:
    from piecegraph.runner.state_layers.kernels.calls import StepRows


def runs_kernels(metadata: StateMetadata, x: torch.Tensor) -> bool:
    """Return whether a step runs as kernels: on a GPU, if a graph holds it or each request has one token."""
    return x.is_cuda and (metadata.host is None or metadata.max_query_len == 1)


class DecodeLayer:
    """One layer in such a step: its states, and the rows of the requests that kernels run."""

    def __init__(
        self,
        metadata: StateMetadata,
        cache: Sequence[torch.Tensor],
        recent: Sequence[torch.Tensor],
        num_leading: int | None = None,
    ) -> None:
        """Store the layer's tensors; `recent` is empty if no state can be taken back.

        `num_leading`: only that many requests, the first, which have one row each; None: all.
        """
        self._metadata = metadata
        self._cache = cache
        self._recent = recent
        self._num_leading = num_leading

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x` that the requests have."""
        return x if self._num_leading is None else x[: self._num_leading]

    @property
    def rows(self) -> StepRows:
        """The requests."""
        from piecegraph.runner.state_layers.kernels.calls import StepRows

        metadata, decoding, count = self._metadata, self._metadata.decoding, self._num_leading
        return StepRows(
            query_start_loc=metadata.query_start_loc[: None if count is None else count + 1],
            seq_lens=metadata.seq_lens[:count],
            block_table=metadata.block_table[:count],
            slot_mapping=metadata.slot_mapping,
            idx_mapping=None if decoding is None else decoding.idx_mapping,
            prefill_lens=None if decoding is None else decoding.prefill_lens,
            num_places=0 if decoding is None else decoding.num_places,
            block_size=metadata.block_size,
            pages_per_block=metadata.pages_per_block,
            has_one_token=count is not None or metadata.max_query_len == 1,
        )

    def kept(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the blocks of the state of that number, and its places."""
        return self._cache[number], self._recent[number] if self._recent else None


def decode_layer(layer: str, x: torch.Tensor) -> DecodeLayer | None:
    """Return the layer of that name in the current step, if the step runs as kernels. `x`: an input of the layer."""
    context = get_forward_context()
    metadata = context.metadata_of(layer)
    assert isinstance(metadata, StateMetadata), type(metadata)
    if not runs_kernels(metadata, x):
        return None
    return DecodeLayer(metadata, context.state_caches[layer].tensors, context.recent_states.get(layer, ()))


def leading_decodes(layer: str) -> DecodeLayer | None:
    """Return the layer of that name with the requests that its plan leaves to kernels; None: there are none."""
    context = get_forward_context()
    metadata = context.metadata_of(layer)
    assert isinstance(metadata, StateMetadata), type(metadata)
    count = metadata.num_kernel_decodes
    if not count:
        return None
    return DecodeLayer(metadata, context.state_caches[layer].tensors, context.recent_states.get(layer, ()), count)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, found: DecodeLayer
) -> torch.Tensor:
    """Return the convolution of `x` `[num_tokens, channels]`, whose windows are the layer's first states."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    convolve_into(out, x, weight, bias, activation, found)
    return out


def convolve_into(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    found: DecodeLayer,
) -> None:
    """Write that convolution to `out`."""
    from piecegraph.runner.state_layers.kernels.calls import conv_step

    windows, places = found.kept(0)
    conv_step(x.contiguous(), weight, bias, out, windows, places, found.rows, is_silu=activation is not None).launch()


def attend_linearly(
    mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, out: torch.Tensor, found: DecodeLayer, *,
    num_k_heads: int, scale: float,
) -> None:  # fmt: skip
    """Write the result of the gated delta rule to `out`; `mixed` is convolved."""
    from piecegraph.runner.state_layers.kernels.calls import delta_step

    states, places = found.kept(1)
    delta_step(
        mixed,
        decay.contiguous(),
        beta.contiguous(),
        out,
        states,
        places,
        found.rows,
        num_k_heads=num_k_heads,
        scale=scale,
        norm_eps=NORM_EPS,
    ).launch()


def scan_into(
    out: torch.Tensor, mixed: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, D: torch.Tensor, found: DecodeLayer, *,  # noqa: N803
    num_groups: int, number: int,
) -> None:  # fmt: skip
    """Write the result of a scan to `out`; `mixed` is convolved. `number`: of the recurrent state."""
    from piecegraph.runner.state_layers.kernels.calls import scan_step

    states, places = found.kept(number)
    scan_step(mixed, dt.contiguous(), A, D, out, states, places, found.rows, num_groups=num_groups).launch()
