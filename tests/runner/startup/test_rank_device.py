"""Where a rank runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.startup.rank_device import device_of, rank_device
from piecegraph.runner.tensor_parallel.parallel import Parallel
from piecegraph.runner.tensor_parallel.process_group import RankGroup


def test_ranks_share_a_cpu() -> None:
    assert rank_device("cpu", RankGroup(dist.HashStore(), 1, 2, 1.0)) == torch.device("cpu")


def test_one_gpu_is_not_for_all_ranks() -> None:
    with pytest.raises(ConfigError, match="device='cuda:0' with 2 ranks, each of which has its GPU; give 'cuda'"):
        rank_device("cuda:0", RankGroup(dist.HashStore(), 1, 2, 1.0))


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="rank 5 needs GPU 1, and torch sees 1 here"):
        rank_device(None, RankGroup(dist.HashStore(), 5, 8, 1.0, local_rank=1))


def test_several_machines_with_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "piecegraph.runner.startup.rank_device.resolve_device", lambda name: torch.device(name or "cuda")
    )
    parallel = Parallel(group=RankGroup(dist.HashStore(), 1, 2, 1.0), runner_kind=ModelRunner)
    config = EngineConfig(source=ModelSource(model="a/b"), tensor_parallel_size=2, nnodes=2)
    with pytest.raises(ConfigError, match="nnodes=2 is not yet available on GPUs; give device='cpu'"):
        device_of(config, parallel)
    assert device_of(replace(config, device="cpu"), parallel) == torch.device("cpu")
