"""What is planned for a model and for the model that drafts for it, by mode and by what attention supports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.backend import AttentionBackend, AttentionCGSupport
from piecegraph.runner.attention.triton.backend import TritonBackend
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan, plan_for

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
CONFIG = EngineConfig(
    source=ModelSource(model="any"),
    device="cpu",
    graph_kind="recorded",
    cudagraph_capture_sizes=(1, 2, 4, 8),
    max_num_seqs=3,
    max_num_batched_tokens=8,
    speculative=SpeculativeConfig(method="draft_model", model="another", num_speculative_tokens=3),
)


def supporting(support: AttentionCGSupport) -> AttentionBackend:
    backend: Any = TritonBackend()
    backend.cudagraph_support = support
    return backend


def planned(support: AttentionCGSupport = AttentionCGSupport.ALWAYS, **options: Any) -> GraphPlan:
    return plan_for(
        replace(CONFIG, **options),
        supporting(support),
        torch.device("cpu"),
        can_split=True,
        has_states=False,
        max_num_batched_tokens=options.get("max_num_batched_tokens", 8),
    )


def full(plan: GraphPlan) -> list[tuple[int | None, int | None]]:
    return [(one.num_reqs, one.uniform_token_count) for one in plan.full]


def test_a_model_has_graphs_of_decode_and_of_verifications() -> None:
    """As far as a step may compute so many tokens."""
    plan = planned()
    assert full(plan) == [(1, 1), (2, 1), (3, 1), (1, 4), (2, 4)]
    assert len(plan.piecewise) == 4 and plan.resolved.reasons == ()
    assert full(planned(speculative=None)) == [(1, 1), (2, 1), (3, 1)]


def test_by_default_mixed_batches_have_fewer_small_sizes_where_decode_is_full() -> None:
    """Sizes that were named are taken as they are, and so is every size where decode itself runs PIECEWISE.

    Engines that share experts pad a batch with prompts to the size of another's decode batch.
    """

    def sizes(**options: Any) -> list[int]:
        return [one.num_tokens for one in planned(max_num_batched_tokens=160, speculative=None, **options).piecewise]

    small = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160]
    assert sizes(cudagraph_capture_sizes=None) == [16, 64, 96, 128, 160]
    assert sizes(cudagraph_capture_sizes=None, cudagraph_mode="PIECEWISE") == small
    assert sizes(cudagraph_capture_sizes=None, support=AttentionCGSupport.NEVER) == small
    assert sizes(cudagraph_capture_sizes=(1, 4, 160)) == [1, 4, 160]
    assert sizes(cudagraph_capture_sizes=None, enable_expert_parallel=True, data_parallel_size=2) == small
    assert sizes(cudagraph_capture_sizes=None, data_parallel_size=2) == [16, 64, 96, 128, 160]


def test_a_draft_has_graphs_of_its_passes_and_no_others() -> None:
    """One for each number of requests that decode has one for; prompts are read without graphs."""
    plan = planned(is_draft=True)
    assert full(plan) == [(1, 2), (2, 2), (3, 2)]
    assert [one.num_tokens for one in plan.full] == [2, 4, 6]
    assert plan.piecewise == () and plan.resolved.mixed_mode is NONE and plan.resolved.decode_mode is FULL


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_without_full_decode_a_draft_has_no_graph(mode: str) -> None:
    """That was asked for, so it is no downgrade."""
    plan = planned(is_draft=True, cudagraph_mode=mode, strict=True)
    assert not plan.has_graphs and plan.resolved.reasons == () and plan.resolved.decode_mode is NONE


def test_attention_of_one_token_a_request_is_the_reason_for_no_graph() -> None:
    """Of verifications and of drafts; with `strict` it is an error."""
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    plan = planned(single)
    assert full(plan) == [(1, 1), (2, 1), (3, 1)]
    (reason,) = plan.resolved.reasons
    assert reason.startswith("verifications run PIECEWISE instead of FULL: attention backend 'triton' supports UNIFORM")
    draft = planned(single, is_draft=True)
    assert not draft.has_graphs and draft.resolved.decode_mode is NONE
    (reason,) = draft.resolved.reasons
    assert reason.startswith("its passes run NONE instead of FULL: attention backend 'triton' supports UNIFORM")
    for is_draft, what in ((False, "verifications run"), (True, "its passes run")):
        with pytest.raises(ConfigError, match=f"strict=True allows no downgrade, and {what}"):
            planned(single, is_draft=is_draft, strict=True)


def test_no_gpu_is_the_reason_for_a_draft_too() -> None:
    plan = planned(is_draft=True, graph_kind="auto")
    assert not plan.has_graphs and "there is no GPU" in plan.resolved.reasons[0]
