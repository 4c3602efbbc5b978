"""The step loop never waits for the GPU, but where a step's output is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from tests.runner.test_graphs import load

pytestmark = pytest.mark.gpu

OPTIONS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"temperature": 0.7, "min_tokens": 4, "stop_token_ids": [3], "logit_bias": {5: 2.0}},
    {"temperature": 0.7, "allowed_token_ids": [5, 6, 7, 8], "n": 2},
)


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever makes torch wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_mixed_workload_waits_for_nothing(llama_dir: Path) -> None:
    """Every sampling option, chunked prompts, preemptions, aborts and arrivals in the middle, all three modes."""
    with load(llama_dir, device="cuda", dtype="bfloat16", num_kv_blocks=10) as llm:
        engine = llm.engine
        for round_ in range(2):  # the first warms up allocators and kernels no graph has run
            for i, options in enumerate(OPTIONS):
                params = SamplingParams(max_tokens=24, ignore_eos=True, **options)  # type: ignore[arg-type]
                engine.add_request(f"{round_}-{i}", list(range(4, 8 + 5 * i)), params)
            steps = 0
            while engine.has_unfinished:
                if round_ == 0:
                    engine.step()
                    continue
                with no_sync():
                    engine.step()
                steps += 1
                if steps == 5:
                    engine.abort(f"{round_}-1")
                    engine.add_request("late", [9] * 20, SamplingParams(max_tokens=5, temperature=0.0))
        modes = {mode.value for mode, count in llm.runner.counters.by_mode().items() if count}
        assert modes == {"FULL", "PIECEWISE", "NONE"}
        assert engine.stats.num_preemptions > 0
