"""Ranks draft by prompt lookup and answer as one process without drafts does."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph import LLM
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from tests.runner.distributed.test_executor import SLOW_MACHINE_S
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.speculative.drafting_llm import NGRAM, SIZES, answers, assert_same
from tests.runner.test_graphs import load

GRAPHS = {"attention_backend": "triton", "graph_kind": "recorded", "max_model_len": 64}


def accepted(llm: LLM) -> int:
    """The accepted drafts, where there were rejected ones, too."""
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks and stats.speculation is not None
    assert stats.speculation.num_wasted_tokens > 0
    return stats.speculation.num_accepted_tokens


@pytest.mark.slow
def test_ranks_answer_as_one_process_without_drafts(llama_dir: Path) -> None:
    """Every option, chunks, prefixes and preemptions, a step ahead, over graphs of two ranks, which are threads."""
    with load(llama_dir, **SIZES) as llm:
        expected = answers(llm)
    options = {**SIZES, **GRAPHS, "num_kv_blocks": 17, "async_scheduling": True, "tensor_parallel_size": 2}
    with llm_of_threads(llama_dir, speculative_config=NGRAM, **options) as llm:
        assert_same(answers(llm), expected)
        assert accepted(llm) > 10
        assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0
        assert llm.engine.stats.num_preemptions > 0


@pytest.mark.slow
def test_ranks_in_processes_draft(llama_dir: Path) -> None:
    """Each step awaited."""
    with load(llama_dir, **SIZES) as llm:
        expected = answers(llm)
    ranks = {"tensor_parallel_size": 2, "distributed_timeout_seconds": SLOW_MACHINE_S}
    with load(llama_dir, speculative_config=NGRAM, **SIZES, **ranks) as llm:
        assert len(llm.collective_rpc("report")) == 2
        assert_same(answers(llm), expected)
        assert accepted(llm) > 10
