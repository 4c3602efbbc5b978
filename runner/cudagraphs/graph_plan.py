"""The plan of the graphs that a runner captures, made once before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.passes.pipeline import pipeline
from piecegraph.runner.attention.interface.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.speculative_config import HEADS, SpeculativeConfig
from piecegraph.runner.cudagraphs.capture_sizes import (
    NUM_FIRST_DRAFT_TOKENS,
    SIZES_ON_A_CPU,
    SMALL_MIXED_SIZES,
    default_capture_sizes,
    full_decode_descriptors,
    full_draft_descriptors,
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
    is_for_fused_layers: bool = False  # graphs pay only if `fuse-int8-layers` takes the layers: see `after_passes`

    @property
    def has_graphs(self) -> bool:
        """Return whether any graph is captured."""
        return bool(self.full or self.piecewise)


def after_passes(plan: GraphPlan, matches: Mapping[str, int], num_layers: int) -> GraphPlan:
    """Return the plan once it is known how many `matches` each pass has, in a model with so many calls of attention."""
    if not plan.is_for_fused_layers or 0 < matches.get("fuse-int8-layers", 0) >= num_layers - 1:
        return plan
    reason = "NONE runs: there is no GPU, where graphs pay, and the pass fuse-int8-layers does not match every layer"
    none = CUDAGraphMode.NONE
    return GraphPlan(resolved=ResolvedMode(decode_mode=none, mixed_mode=none, reasons=(reason,)), full=(), piecewise=())


def plan_for(
    config: EngineConfig,
    backend: AttentionBackend,
    device: torch.device,
    *,
    can_split: bool,
    has_states: bool,
    max_num_batched_tokens: int,
    has_only_int8_weights: bool = False,
) -> GraphPlan:
    """Return the plan for a model, or, if `config.is_draft`, for the passes of a draft model. See `plan_graphs`."""
    num_drafts = 0 if config.speculative is None or config.is_draft else config.speculative.num_speculative_tokens
    plan = plan_graphs(
        mode=CUDAGraphMode.parse(config.cudagraph_mode),
        capture_sizes=config.cudagraph_capture_sizes,
        backend=backend,
        device=device,
        graph_kind=config.graph_kind,
        can_split=can_split,
        has_states=has_states,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        strict=config.strict,
        num_speculative_tokens=num_drafts,
        agrees_on_sizes=config.shares_experts,
        replays_kernels=has_only_int8_weights and not has_states and _replays_int8_kernels(config, backend, device),
    )
    if config.enable_lora:
        plan = _with_adapters(plan, config.max_loras)
    if not config.is_draft:
        return plan
    return _draft_plan(plan, backend, num_first_tokens=num_first_draft_tokens(config.speculative), strict=config.strict)


def _replays_int8_kernels(config: EngineConfig, backend: AttentionBackend, device: torch.device) -> bool:
    """Return whether a step over int8 weights on a CPU is little but calls of our C++ kernels (`FuseInt8Layers`)."""
    if device.type != "cpu" or backend.name != "sdpa" or config.compile.compiler != "inductor":
        return False
    if config.num_ranks > 1 or config.enable_lora or config.shares_experts:
        return False
    names = {each.name for each in pipeline(config.compile.passes, device.type)}
    return {"fuse-int8-rope", "fuse-int8-layers"} <= names


def _with_adapters(plan: GraphPlan, num_slots: int) -> GraphPlan:
    """Return the plan with a second graph of each bucket, for batches with adapters."""
    full, piecewise = (
        (*buckets, *(replace(each, num_active_loras=num_slots) for each in buckets))
        for buckets in (plan.full, plan.piecewise)
    )
    return replace(plan, full=full, piecewise=piecewise)


def num_first_draft_tokens(speculative: SpeculativeConfig | None) -> int:
    """Return how many tokens of a request the first pass reads that drafts: of a head as many as are verified."""
    if speculative is None or speculative.method not in HEADS:
        return NUM_FIRST_DRAFT_TOKENS
    return 1 + speculative.num_speculative_tokens


def _draft_plan(plan: GraphPlan, backend: AttentionBackend, *, num_first_tokens: int, strict: bool) -> GraphPlan:
    """Return what is captured of a draft model for which `plan` would be made if it were served itself.

    Its passes after a step are one graph for each number of requests. Prompts are read without graphs.
    """
    decode = tuple(one for one in plan.full if one.uniform_token_count == 1)
    can_capture = bool(decode) and backend.cudagraph_support >= AttentionCGSupport.UNIFORM_BATCH
    reasons = plan.resolved.reasons if not decode else ()
    if decode and not can_capture:
        reasons = (f"its passes run NONE instead of FULL: {_no_uniform_batches(backend)}",)
        if strict:
            raise ConfigError(f"strict=True allows no downgrade, and {reasons[0]}.")
    resolved = replace(
        plan.resolved,
        decode_mode=CUDAGraphMode.FULL if can_capture else CUDAGraphMode.NONE,
        mixed_mode=CUDAGraphMode.NONE,
        reasons=reasons,
    )
    full = full_draft_descriptors(decode, num_first_tokens) if can_capture else ()
    return GraphPlan(resolved=resolved, full=full, piecewise=())


def _no_uniform_batches(backend: AttentionBackend) -> str:
    return (
        f"attention backend {backend.name!r} supports {backend.cudagraph_support.name}, and graphs of several tokens a "
        f"request need {AttentionCGSupport.UNIFORM_BATCH.name}"
    )


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
    agrees_on_sizes: bool = False,
    replays_kernels: bool = False,
) -> GraphPlan:
    """Return the plan for one configuration.

    `can_split`: the model is split into several pieces. `replays_kernels`: as in `resolve_cudagraph_mode`; by default
    few sizes are captured then (`SIZES_ON_A_CPU`). `has_states`: some layers have states, which FULL graphs hold
    for uniform batches.

    `num_speculative_tokens`: the most drafts of a request; if there are any, uniform batches in which each request
    verifies as many are captured for the same numbers of requests as decode.

    Uniform decode is captured under its mode for every size up to `max_num_seqs`. If that mode is FULL, PIECEWISE is
    also captured if it is the mode of the other batches: for all of `capture_sizes`, or by default for fewer small
    sizes (`SMALL_MIXED_SIZES`), unless `agrees_on_sizes`: this engine pads its batches to sizes of others, too, which
    may be those of a decode batch. Raises `ConfigError` for a downgrade if
    `strict`.
    """
    support, what = backend.cudagraph_support, f"attention backend {backend.name!r}"
    if has_states:
        of_states = AttentionCGSupport.UNIFORM_BATCH
        if of_states < support:
            support, what = of_states, "the code of layers with states"
    resolved = resolve_cudagraph_mode(
        mode,
        support,
        supporter=what,
        is_cuda=device.type == "cuda",
        graph_kind=graph_kind,
        replays_kernels=replays_kernels,
        can_split=can_split,
        strict=strict,
    )
    if capture_sizes is None and replays_kernels and graph_kind == "auto":
        most = min(max_num_seqs, max_num_batched_tokens, SIZES_ON_A_CPU[-1])
        capture_sizes = sorted({most, *(size for size in SIZES_ON_A_CPU if size < most)})
    sizes = tuple(capture_sizes) if capture_sizes is not None else default_capture_sizes(max_num_batched_tokens)
    if strict:
        _refuse_sizes_left_out(sizes, resolved, max_num_seqs, max_num_batched_tokens)
    modes = {resolved.decode_mode, resolved.mixed_mode}
    full: tuple[BatchDescriptor, ...] = ()
    if resolved.decode_mode is CUDAGraphMode.FULL:
        full += full_decode_descriptors(sizes, max_num_seqs)
        if num_speculative_tokens and backend.cudagraph_support >= AttentionCGSupport.UNIFORM_BATCH:
            full += full_verification_descriptors(full, num_speculative_tokens, max_num_batched_tokens)
        elif num_speculative_tokens:
            reason = f"verifications run {resolved.mixed_mode.value} instead of FULL: {_no_uniform_batches(backend)}"
            if strict:
                raise ConfigError(f"strict=True allows no downgrade, and {reason}.")
            resolved = replace(resolved, reasons=(*resolved.reasons, reason))
    if resolved.mixed_mode is CUDAGraphMode.FULL:
        full += full_mixed_descriptors(sizes, max_num_seqs)
    if capture_sizes is None and resolved.decode_mode is CUDAGraphMode.FULL and not agrees_on_sizes:
        sizes = default_capture_sizes(max_num_batched_tokens, SMALL_MIXED_SIZES)
    return GraphPlan(
        resolved=resolved,
        full=full,
        piecewise=piecewise_descriptors(sizes) if CUDAGraphMode.PIECEWISE in modes else (),
        is_for_fused_layers=replays_kernels and graph_kind == "auto",
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
