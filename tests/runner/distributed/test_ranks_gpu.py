"""Two GPUs, a process each, answer as one GPU does, in graphs whose collectives are NCCL's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from piecegraph.errors import WorkerError
from tests.runner.distributed.test_executor import GREEDY, PROMPTS, assert_answers, processes_of, two_ranks
from tests.runner.tiny_models import make_model, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_gpus_answer_as_one(tmp_path: Path, name: str, mode: str) -> None:
    with two_ranks(
        save(make_model(name), tmp_path), device="cuda", compiler="inductor", cudagraph_mode=mode, compile_workers=None
    ) as llm:
        assert_answers(llm, name)
        assert [report["rank"] for report in llm.collective_rpc("report")] == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_call_and_frees_its_gpu(tmp_path: Path, number: int) -> None:
    """Also where the rank does not end but stops: its GPU takes no part, and the other GPU waits in a collective."""
    folder = save(make_model("llama"), tmp_path)
    llm = two_ranks(folder, device="cuda", compile_workers=None, distributed_timeout_seconds=4.0)
    try:
        (pid,) = processes_of(llm)
        assert_answers(llm, "llama")
        os.kill(pid, number)
        with pytest.raises(WorkerError):
            llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    finally:
        llm.close()
    for _ in range(100):
        if torch.cuda.device_memory_used(1) < 2**30:
            break
        time.sleep(0.1)
    with two_ranks(folder, device="cuda", compile_workers=None) as again:
        assert_answers(again, "llama")
