"""The step loop never waits for the GPU, but where a step's output is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runner.no_sync import run_mixed_requests
from tests.runner.test_graphs import load

pytestmark = pytest.mark.gpu

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"temperature": 0.7, "min_tokens": 4, "stop_token_ids": [3], "logit_bias": {5: 2.0}},
    {"temperature": 0.7, "allowed_token_ids": [5, 6, 7, 8], "n": 2},
)


def test_a_mixed_workload_waits_for_nothing(llama_dir: Path) -> None:
    """Every sampling option, chunked prompts, preemptions, aborts and arrivals in the middle, all three modes."""
    with load(llama_dir, device="cuda", dtype="bfloat16", num_kv_blocks=10) as llm:
        engine = llm.engine
        run_mixed_requests(engine, OPTIONS, prompt_step=5)
        modes = {mode.value for mode, count in llm.runner.counters.by_mode().items() if count}
        assert modes == {"FULL", "PIECEWISE", "NONE"}
        assert engine.stats.num_preemptions > 0
