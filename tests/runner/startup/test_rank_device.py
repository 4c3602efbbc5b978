"""Where a rank runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.distributed.rank_parallel import rank_parallel
from piecegraph.runner.startup.rank_device import rank_device
from piecegraph.runner.tensor_parallel.engine_peers import EnginePeers
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


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"tensor_parallel_size": 4, "nnodes": 2}, [0, 1, 0, 1]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, [0, 1, 2, 3]),
    ],
)
def test_a_rank_has_the_gpu_of_its_number_on_its_machine(layout: dict[str, int], expected: list[int]) -> None:
    config = EngineConfig(source=ModelSource(model="a/b"), **layout)  # type: ignore[arg-type]
    found = [rank_parallel(config, dist.HashStore(), rank, 1.0).group.local_rank for rank in range(4)]
    assert found == expected


def test_a_rank_of_engines_that_share_experts_counts_those_of_engines_before(tmp_path: Path) -> None:
    """They see the GPUs of all."""
    layout: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    config = EngineConfig(source=ModelSource(model="a/b"), **layout)
    peers = [EnginePeers(engine=engine, num_engines=2, store=str(tmp_path / "store")) for engine in range(2)]
    found = [
        rank_parallel(config, dist.HashStore(), rank, 1.0, peers=each).group.local_rank
        for each in peers
        for rank in range(2)
    ]
    assert found == [0, 1, 2, 3]
