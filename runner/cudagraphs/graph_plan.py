"""The plan of the graphs that a runner captures, made once before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.cudagraphs.capture_sizes import (
    default_capture_sizes,
    full_decode_descriptors,
    full_mixed_descriptors,
    full_verification_descriptors,
    piecewise_descriptors,
)
from piecegraph.runner.cudagraphs.policy import ResolvedMode, resolve_cudagraph_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The modes that batches run under, and the buckets to capture for these modes."""

    resolved: ResolvedMode
    full: tuple[BatchDescriptor, ...]
    piecewise: tuple[BatchDescriptor, ...]

    @property
    def has_graphs(self) -> bool:
        """Return whether any graph is captured."""
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
    num_speculative_tokens: int = 0,
    has_states: bool = False,
) -> GraphPlan:
    """Return the plan for one configuration.

    `can_split`: the model is split into several pieces. `has_states`: some layers have states, which FULL graphs hold
    for uniform decode on a CPU only.

    `num_speculative_tokens`: the most drafts of a request; if there are any, uniform batches in which each request
    verifies as many are captured for the same numbers of requests as decode.

    Uniform decode is captured under its mode for every size up to `max_num_seqs`; if that mode is FULL, PIECEWISE is
    also captured, for all sizes, if it is the mode of the other batches. Raises `ConfigError` for a downgrade if
    `strict`.
    """
    support, what = backend.cudagraph_support, f"attention backend {backend.name!r}"
    if has_states:
        of_states = AttentionCGSupport.NEVER
        if device.type == "cpu":
            of_states = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if of_states < support:
            support, what = of_states, "the code of layers with states"
    resolved = resolve_cudagraph_mode(
        mode,
        support,
        supporter=what,
        is_cuda=device.type == "cuda",
        graph_kind=graph_kind,
        can_split=can_split,
        strict=strict,
    )
    sizes = tuple(capture_sizes) if capture_sizes is not None else default_capture_sizes(max_num_batched_tokens)
    if strict:
        _refuse_sizes_left_out(sizes, resolved, max_num_seqs, max_num_batched_tokens)
    modes = {resolved.decode_mode, resolved.mixed_mode}
    full: tuple[BatchDescriptor, ...] = ()
    if resolved.decode_mode is CUDAGraphMode.FULL:
        full += full_decode_descriptors(sizes, max_num_seqs)
        if num_speculative_tokens and backend.cudagraph_support >= AttentionCGSupport.UNIFORM_BATCH:
            full += full_verification_descriptors(full, num_speculative_tokens, max_num_batched_tokens)
    if resolved.mixed_mode is CUDAGraphMode.FULL:
        full += full_mixed_descriptors(sizes, max_num_seqs)
    return GraphPlan(
        resolved=resolved,
        full=full,
        piecewise=piecewise_descriptors(sizes) if CUDAGraphMode.PIECEWISE in modes else (),
    )


def _refuse_sizes_left_out(
    sizes: Sequence[int], resolved: ResolvedMode, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """Raise `ConfigError` if a step may compute more tokens than any graph holds.

    With `strict`, the requests of such a batch could never run.
    """
    none = CUDAGraphMode.NONE
    if resolved.mixed_mode is not none:
        most, limit = max_num_batched_tokens, f"max_num_batched_tokens={max_num_batched_tokens}"
    elif resolved.decode_mode is not none:
        most, limit = max_num_seqs, f"max_num_seqs={max_num_seqs}"
    else:
        return
    if sizes[-1] < most:
        raise ConfigError(
            f"strict=True, and a step may compute {most} tokens ({limit}), but the largest of cudagraph_capture_sizes "
            f"is {sizes[-1]}. Add {most} to them, lower {limit.partition('=')[0]}, or leave strict out."
        )
