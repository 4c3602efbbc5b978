"""Ranks of one model take the tokens that a grammar forces, and answer as one process does that draws each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecegraph import LLM
from piecegraph.runner.engine.constrained import ConstrainedRequests
from tests.runner.data_parallel.engines_in_threads import llm_of_engines
from tests.runner.engine.test_constrained import LONG, params
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads

REQUESTS = [
    params(LONG, max_tokens=120),
    params(LONG, max_tokens=120, seed=2, temperature=0.7, presence_penalty=0.5, n=2),
    params(LONG, max_tokens=20),
    params(None, max_tokens=30),
    params({"regex": "x{20}[ab]y{3}"}, max_tokens=60, repetition_penalty=1.2),
    params(LONG, max_tokens=60, logprobs=1),  # draws each of its tokens
]
PROMPTS = [f"number {number} " * (1 + number % 3) for number in range(len(REQUESTS))]


def answers(llm: LLM) -> tuple[list[Any], int]:
    """The tokens and ends of all completions, and how many tokens were forced."""
    outputs = llm.generate(PROMPTS, REQUESTS, use_tqdm=False)
    found = [(list(one.token_ids), one.finish_reason) for output in outputs for one in output.outputs]
    return found, llm.engine.num_forced_tokens


@pytest.mark.slow
def test_forced_tokens_of_two_ranks_are_those_that_one_process_draws(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, `n`, penalties, and free requests beside them, a step ahead, over graphs."""
    options: dict[str, Any] = {
        "block_size": 4,
        "num_kv_blocks": 24,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "cudagraph_capture_sizes": (1, 2, 4, 16),
        "graph_kind": "recorded",
        "attention_backend": "triton",
        "skip_tokenizer_init": False,
        "async_scheduling": True,
    }
    with llm_of_threads(llama_dir, **options) as llm, monkeypatch.context() as patch:
        patch.setattr(ConstrainedRequests, "take_forced", lambda *arguments: [])
        expected, none = answers(llm)
        assert none == 0
    with llm_of_threads(llama_dir, tensor_parallel_size=2, **options) as llm:
        found, num_forced = answers(llm)
        assert found == expected and num_forced > 60
        assert len(llm.collective_rpc("report")) == 2
    with llm_of_engines(llama_dir, 2, **options) as llm:
        assert answers(llm)[1] > 60  # of both engines
