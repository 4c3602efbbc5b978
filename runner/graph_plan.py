"""Which graphs a runner captures: decided once, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.attention.backend import AttentionBackend
from piecegraph.runner.capture_sizes import (
    default_capture_sizes,
    full_decode_descriptors,
    full_mixed_descriptors,
    piecewise_descriptors,
)
from piecegraph.runner.cudagraph_policy import ResolvedMode, resolve_cudagraph_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The modes batches are to run under, and the buckets to capture for them."""

    resolved: ResolvedMode
    full: tuple[BatchDescriptor, ...]
    piecewise: tuple[BatchDescriptor, ...]

    @property
    def has_graphs(self) -> bool:
        return bool(self.full or self.piecewise)


def plan_graphs(
    *,
    mode: CUDAGraphMode,
    capture_sizes: Sequence[int] | None,
    backend: AttentionBackend,
    device: torch.device,
    graph_kind: str,
    can_split: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    strict: bool,
) -> GraphPlan:
    """The plan for one configuration. `can_split`: the model is cut into several pieces.

    Uniform decode is captured under its mode for every size up to `max_num_seqs`; if that mode is FULL,
    PIECEWISE is captured for all sizes when it is the mode of the other batches. Raises `ConfigError`
    for a strict downgrade.
    """
    resolved = resolve_cudagraph_mode(
        mode,
        backend.cudagraph_support,
        backend_name=backend.name,
        is_cuda=device.type == "cuda",
        graph_kind=graph_kind,
        can_split=can_split,
        strict=strict,
    )
    sizes = tuple(capture_sizes) if capture_sizes is not None else default_capture_sizes(max_num_batched_tokens)
    modes = {resolved.decode_mode, resolved.mixed_mode}
    full: tuple[BatchDescriptor, ...] = ()
    if resolved.decode_mode is CUDAGraphMode.FULL:
        full += full_decode_descriptors(sizes, max_num_seqs)
    if resolved.mixed_mode is CUDAGraphMode.FULL:
        full += full_mixed_descriptors(sizes, max_num_seqs)
    return GraphPlan(
        resolved=resolved,
        full=full,
        piecewise=piecewise_descriptors(sizes) if CUDAGraphMode.PIECEWISE in modes else (),
    )
