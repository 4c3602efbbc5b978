"""Engines on GPUs of their own answer as one does, also where they share experts over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecegraph.runner.distributed.worker import Worker
from tests.runner.data_parallel.test_engine_processes import engines
from tests.runner.distributed.test_executor import assert_answers
from tests.runner.tiny_models import make_model, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def gpu_of(worker: Worker) -> str:
    return str(torch.cuda.get_device_properties(worker.loaded.device).uuid)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("mixtral", {"enable_expert_parallel": True, "cudagraph_mode": "NONE"}),
        ("mixtral", {"enable_expert_parallel": True}),
    ],
    ids=["own weights", "shared experts without graphs", "shared experts"],
)
def test_two_engines_have_a_gpu_each(name: str, options: dict[str, object], tmp_path: Path) -> None:
    with engines(save(make_model(name), tmp_path), 2, device="cuda", compiler="inductor", **options) as llm:
        assert_answers(llm, name)
        assert len(set(llm.collective_rpc(gpu_of))) == 2
