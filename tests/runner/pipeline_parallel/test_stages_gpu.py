"""Two stages on a GPU each answer as one GPU does, with hidden states sent by NCCL outside of the graphs."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from piecegraph import LLM
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import WorkerError
from piecegraph.runner.distributed.worker import Worker
from tests.runner.distributed.test_executor import GREEDY, PROMPTS, assert_answers, processes_of, two_ranks
from tests.runner.tiny_models import make_model, save

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("ends_in_time"),
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def num_graphs(worker: Worker) -> dict[str, int]:
    graphs = worker.loaded.runner.graphs
    return {mode.value: len(graphs.descriptors(mode)) for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)}


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()


def stages(folder: Path, **options: object) -> LLM:
    arguments = {"device": "cuda", "compile_workers": None, "cudagraph_capture_sizes": [1, 2, 4, 8, 32], **options}
    return two_ranks(folder, size=1, pipeline_parallel_size=2, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_captured_stages_answer_as_one_gpu_until_one_is_lost(tmp_path: Path, number: int) -> None:
    """Both stages have FULL graphs and PIECEWISE ones. A stage is lost while batches are in flight on both GPUs."""
    folder = save(make_model("llama"), tmp_path)
    llm = stages(folder, cudagraph_mode="FULL_AND_PIECEWISE", distributed_timeout_seconds=6.0)
    try:
        (pid,) = processes_of(llm)
        for _ in range(2):
            assert_answers(llm, "llama")
        assert all(min(found.values()) > 0 for found in llm.collective_rpc(num_graphs))
        stats = llm.engine.stats
        assert stats.num_bubbles < stats.num_pipeline_steps, "several batches were in flight"
        for place in range(64):
            llm.engine.add_request(f"r{place}", PROMPTS[place % 3], GREEDY)
        for _ in range(4):
            llm.engine.step()
        os.kill(pid, number)
        started = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1"):
            finish(llm)
        logger.info("the loss of a stage was noticed after %.2f s", time.monotonic() - started)
    finally:
        started = time.monotonic()
        llm.close()
        logger.info("closed after %.2f s", time.monotonic() - started)


@pytest.mark.parametrize(("mode", "compiler"), [("NONE", "eager"), ("PIECEWISE", "inductor")])
def test_stages_answer_as_one_gpu(tmp_path: Path, mode: str, compiler: str) -> None:
    with stages(save(make_model("llama"), tmp_path), compiler=compiler, cudagraph_mode=mode) as llm:
        assert_answers(llm, "llama")
