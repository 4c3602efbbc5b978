"""Sums through symmetric memory are sums, equal on all ranks, and end though a rank is lost."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from piecegraph.runner.tensor_parallel.process_group import RankGroup
from piecegraph.runner.tensor_parallel.symmetric_sums import (
    NCCL,
    ONE_SHOT,
    SIZES,
    TWO_SHOT,
    fastest_ways,
    why_not_symmetric,
)

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_the_fastest_way_is_taken_up_to_where_nccl_is() -> None:
    times = {
        2**13: {NCCL: 20.0, ONE_SHOT: 5.0, TWO_SHOT: 7.0},
        2**15: {NCCL: 20.0, ONE_SHOT: 9.0, TWO_SHOT: 8.0},
        2**17: {NCCL: 21.0, ONE_SHOT: 30.0, TWO_SHOT: 22.0},
    }
    assert fastest_ways(times) == {2**13: ONE_SHOT, 2**15: TWO_SHOT}
    assert fastest_ways({2**13: {NCCL: 1.0, ONE_SHOT: 2.0}}) == {}
    between = {2**13: {NCCL: 1.0, ONE_SHOT: 2.0}, 2**15: {NCCL: 3.0, ONE_SHOT: 2.0}}
    assert fastest_ways(between) == {2**13: NCCL, 2**15: ONE_SHOT}


def test_ranks_that_cannot_read_each_other_have_a_reason() -> None:
    assert why_not_symmetric(["a", "a"], 2, lambda one, other: True) == ""
    assert why_not_symmetric(["a", "b"], 2, lambda one, other: True) == "the ranks are on several hosts"
    assert why_not_symmetric(["a", "a"], 1, lambda one, other: True) == "1 GPUs are visible to 2 ranks"
    reason = why_not_symmetric(["a", "a", "a"], 3, lambda one, other: (one, other) != (1, 2))
    assert reason == "GPU 1 cannot read the memory of GPU 2"


def connected(rank: int, store: str) -> tuple[RankGroup, torch.device]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = RankGroup(dist.FileStore(store, 2), rank, 2, 30.0)
    group.connect(device)
    return group, device


def add_up_everything(rank: int, store: str) -> None:
    group, device = connected(rank, store)
    sums: Any = group._symmetric
    assert sums is not None and "us (NCCL" in group.sums_note, group.sums_note
    sys.stderr.write(f"{group.sums_note}\n")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for size in (*SIZES, 3 * 2**12, 2 * SIZES[-1], 24):
            parts = [torch.randn(size // dtype.itemsize, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
            expected = (parts[0].to(dtype) + parts[1].to(dtype)).to(device)
            x = parts[rank].to(device, dtype)
            assert torch.equal(group.all_reduce(x), expected) and torch.equal(x, parts[rank].to(device, dtype))
            for way in (ONE_SHOT, TWO_SHOT) if size in SIZES and dtype != torch.float16 else ():
                output = torch.empty_like(x)
                sums.add_up(x, output, way)
                assert torch.equal(output, expected)
            group.all_reduce_in_place(x)
            assert torch.equal(x, expected)
    graph = torch.cuda.CUDAGraph()
    x, y = torch.ones(4096, device=device, dtype=torch.bfloat16), torch.empty(0)
    with torch.cuda.graph(graph):
        y = group.all_reduce(group.all_reduce(x) + rank)
    for number in range(5):
        x.fill_(number)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 4.0 * number + 1.0))
    group.exchange("is done", "")
    group.close()


def wait_for_a_lost_rank(rank: int, store: str) -> None:
    group, device = connected(rank, store)
    x = torch.ones(4096, device=device, dtype=torch.bfloat16)
    assert group._symmetric is not None and group._symmetric.way(x) != NCCL
    group.exchange("is ready", "")
    if rank == 1:
        os._exit(0)
    for _ in range(200):
        group.all_reduce_in_place(x)
    event = torch.cuda.Event()
    event.record()
    time.sleep(0.5)
    assert not event.query()
    group.abort(event.query)
    assert event.query()
    torch.cuda.synchronize()


@needs_two_gpus
@pytest.mark.gpu
@pytest.mark.usefixtures("ends_in_time")
@pytest.mark.parametrize("run", [add_up_everything, wait_for_a_lost_rank])
def test_two_gpus(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_SYMMETRIC_SUMS", "1")
    processes.spawn(run, args=(str(tmp_path / "store"),), nprocs=2)
