"""The resolution of the configured CUDA graph mode against what the attention backend and the machine support."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.backend import AttentionCGSupport

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedMode:
    """The modes of uniform decode batches and of all other batches, with the reasons for downgrades."""

    decode_mode: CUDAGraphMode
    mixed_mode: CUDAGraphMode
    reasons: tuple[str, ...] = ()


def resolve_cudagraph_mode(
    configured: CUDAGraphMode,
    support: AttentionCGSupport,
    *,
    supporter: str,
    is_cuda: bool,
    graph_kind: str,
    replays_kernels: bool = False,
    uniform_token_count: int = 1,
    can_split: bool = True,
    strict: bool = False,
) -> ResolvedMode:
    """Return the configured mode, each half lowered FULL -> PIECEWISE -> NONE as far as necessary.

    `supporter`: the name of what has the `support`. `replays_kernels`: without a GPU, most of a step is calls of our
    C++ kernels, for which recorded graphs pay.
    `can_split`: the model is split at attention, so that PIECEWISE has pieces. `uniform_token_count`: the number of
    tokens of each request in a uniform decode batch. Raises `ConfigError` with the reason for a downgrade if `strict`,
    and for CUDA graphs without a GPU.
    """
    if graph_kind == "cuda" and not is_cuda:
        raise ConfigError("graph_kind='cuda' needs an NVIDIA GPU; use 'auto', or 'recorded' for the rules alone.")
    decode, mixed = configured.decode_mode, configured.mixed_mode
    reasons: list[str] = []
    if not (is_cuda or replays_kernels) and graph_kind == "auto" and configured is not NONE:
        decode = mixed = NONE
        reasons.append(
            "NONE runs: there is no GPU, where graphs pay; on a CPU they pay where all weights are int8, for one rank "
            "without adapters; graph_kind='recorded' applies their rules"
        )
    needed = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if uniform_token_count == 1
        else (AttentionCGSupport.UNIFORM_BATCH)
    )
    lower = PIECEWISE if can_split else NONE
    if decode is FULL and support < needed:
        reasons.append(
            f"uniform decode runs {lower.value} instead of FULL: {supporter} supports "
            f"{support.name} and FULL decode needs {needed.name}"
        )
        decode = lower
    if mixed is FULL and support < AttentionCGSupport.ALWAYS:
        reasons.append(
            f"mixed batches run {lower.value} instead of FULL: {supporter} supports "
            f"{support.name} and FULL of any batch needs ALWAYS"
        )
        mixed = lower
    if not can_split and PIECEWISE in (decode, mixed):
        reasons.append("NONE runs instead of PIECEWISE: the model is not cut at attention, so it has one piece")
        decode, mixed = (NONE if mode is PIECEWISE else mode for mode in (decode, mixed))
    if strict and reasons:
        raise ConfigError(
            f"strict=True allows no downgrade of cudagraph_mode={configured.value!r}, and {'; '.join(reasons)}."
        )
    return ResolvedMode(decode_mode=decode, mixed_mode=mixed, reasons=tuple(reasons))
