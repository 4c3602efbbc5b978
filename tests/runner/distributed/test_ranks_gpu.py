"""Two GPUs, a process each, answer as one GPU does, in graphs whose collectives are NCCL's."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import WorkerError
from tests.runner.distributed.test_executor import GREEDY, PROMPTS, assert_answers, processes_of, two_ranks
from tests.runner.lora.test_llm_lora import OPTIONS, Family
from tests.runner.lora.test_llm_lora import PROMPTS as LORA_PROMPTS
from tests.runner.speculative.drafting_llm import FEW, NGRAM
from tests.runner.tiny_models import make_model, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("ends_in_time"),
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


def test_two_gpus_draft_and_answer_as_one_without_drafts(tmp_path: Path) -> None:
    """The prompts repeat themselves, so that there is something to look up."""
    options: dict[str, Any] = {"compiler": "inductor", "compile_workers": None, "speculative_config": NGRAM}
    with two_ranks(save(make_model("llama"), tmp_path), device="cuda", **options) as llm:
        for _ in range(2):
            assert_answers(llm, "llama")
        prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 4}]
        llm.generate(prompts, replace(GREEDY, allowed_token_ids=FEW, max_tokens=40), use_tqdm=False)
        speculation = llm.engine.stats.speculation
        assert speculation is not None and speculation.num_accepted_tokens > 0
        assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0


def test_two_gpus_with_adapters_answer_as_the_merged_models(tmp_path: Path) -> None:
    """Every kind of adapter and none in a batch, in graphs."""
    family = Family(tmp_path)
    options = {"device": "cuda", "compiler": "inductor", "compile_workers": None}
    with family.load(tensor_parallel_size=2, **options) as llm:
        numbers = [*range(len(OPTIONS)), None]
        family.check(llm, numbers, [LORA_PROMPTS[0], *([*LORA_PROMPTS[0], number] for number in range(len(OPTIONS)))])
        assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0
