"""The configured mode is resolved once, and every downgrade has its reason."""

from __future__ import annotations

import itertools

import pytest

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.cudagraphs.policy import ResolvedMode, resolve_cudagraph_mode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
NEVER, SINGLE = AttentionCGSupport.NEVER, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.ALWAYS


def resolve(mode: CUDAGraphMode, support: AttentionCGSupport, **options: object) -> ResolvedMode:
    defaults = {"supporter": "some", "is_cuda": True, "graph_kind": "auto"}
    return resolve_cudagraph_mode(mode, support, **{**defaults, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "support", "decode", "mixed", "num_reasons"),
    [
        (BOTH, ALWAYS, FULL, PIECEWISE, 0),
        (BOTH, SINGLE, FULL, PIECEWISE, 0),
        (BOTH, NEVER, PIECEWISE, PIECEWISE, 1),
        (DECODE_ONLY, ALWAYS, FULL, NONE, 0),
        (DECODE_ONLY, NEVER, PIECEWISE, NONE, 1),
        (FULL, ALWAYS, FULL, FULL, 0),
        (FULL, UNIFORM, FULL, PIECEWISE, 1),
        (FULL, NEVER, PIECEWISE, PIECEWISE, 2),
        (PIECEWISE, NEVER, PIECEWISE, PIECEWISE, 0),
        (NONE, NEVER, NONE, NONE, 0),
    ],
)
def test_modes_are_lowered_to_what_the_backend_supports(
    mode: CUDAGraphMode, support: AttentionCGSupport, decode: CUDAGraphMode, mixed: CUDAGraphMode, num_reasons: int
) -> None:
    resolved = resolve(mode, support)
    assert (resolved.decode_mode, resolved.mixed_mode) == (decode, mixed)
    assert len(resolved.reasons) == num_reasons
    assert all("some supports" in reason for reason in resolved.reasons)


def test_several_tokens_a_request_need_more_support() -> None:
    assert resolve(BOTH, SINGLE, uniform_token_count=1).decode_mode is FULL
    assert resolve(BOTH, SINGLE, uniform_token_count=2).decode_mode is PIECEWISE
    assert resolve(BOTH, UNIFORM, uniform_token_count=2).decode_mode is FULL


def test_without_a_gpu_graphs_are_off_unless_asked_for() -> None:
    (reason,) = resolve(BOTH, ALWAYS, is_cuda=False).reasons
    assert reason.startswith("NONE runs: there is no GPU") and "graph_kind='recorded'" in reason
    assert resolve(BOTH, ALWAYS, is_cuda=False, graph_kind="recorded").decode_mode is FULL
    assert resolve(NONE, ALWAYS, is_cuda=False).reasons == ()


def test_cuda_graphs_without_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="graph_kind='cuda' needs an NVIDIA GPU"):
        resolve(BOTH, ALWAYS, is_cuda=False, graph_kind="cuda")


def test_a_model_of_one_piece_has_no_piecewise() -> None:
    resolved = resolve(BOTH, NEVER, can_split=False)
    assert (resolved.decode_mode, resolved.mixed_mode) == (NONE, NONE)
    assert any("not cut at attention" in reason for reason in resolved.reasons)


def test_strict_refuses_exactly_what_would_have_a_reason() -> None:
    for mode, support, is_cuda in itertools.product(CUDAGraphMode, AttentionCGSupport, (True, False)):
        if resolve(mode, support, is_cuda=is_cuda).reasons:
            with pytest.raises(ConfigError, match=f"strict=True allows no downgrade of cudagraph_mode='{mode.value}'"):
                resolve(mode, support, is_cuda=is_cuda, strict=True)
        else:
            resolve(mode, support, is_cuda=is_cuda, strict=True)
