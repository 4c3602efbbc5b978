"""Aborts of a `RankGroup` whose connections are stand-ins that behave as NCCL's."""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.tensor_parallel import process_group
from piecegraph.runner.tensor_parallel.process_group import RankGroup


class NcclGroup:
    """A group whose abort ends what waits, and then returns only once no graph is left, as NCCL's does."""

    def __init__(self) -> None:
        self.kernels_ended = threading.Event()
        self.graphs_freed = threading.Event()
        self.has_returned = threading.Event()

    def abort(self) -> None:
        self.kernels_ended.set()
        self.graphs_freed.wait()
        self.has_returned.set()


def test_an_abort_frees_the_graphs_that_the_communicator_waits_for() -> None:
    group, nccl = RankGroup(dist.HashStore(), 0, 1, 1.0), NcclGroup()
    group._group = nccl
    group.abort(nccl.kernels_ended.is_set, nccl.graphs_freed.set)
    assert nccl.has_returned.is_set()
    with pytest.raises(CollectiveError, match="closed"):
        group._wait(lambda connected: None)
    group.close()


def test_an_abort_ends_though_the_gpu_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is freed then, because it may be running."""
    monkeypatch.setattr(process_group, "ABORT_S", 0.05)
    group, nccl = RankGroup(dist.HashStore(), 0, 1, 1.0), NcclGroup()
    group._group = nccl
    group.abort(lambda: False, nccl.graphs_freed.set)
    assert nccl.kernels_ended.is_set()
    assert not nccl.graphs_freed.is_set()
    nccl.graphs_freed.set()
    assert nccl.has_returned.wait(60)


def test_an_abort_closes_all_connections_at_the_same_time() -> None:
    """The GPU may wait in any of them, and each abort returns only when no graph is left."""
    group, engines = (RankGroup(dist.HashStore(), 0, 1, 1.0) for _ in range(2))
    first, second, stages = NcclGroup(), NcclGroup(), NcclGroup()
    group._group, engines._group, group.engines = first, second, engines
    all_of_them = (first, second, stages)

    def free_graphs() -> None:
        for each in all_of_them:
            each.graphs_freed.set()

    group.abort(lambda: all(each.kernels_ended.is_set() for each in all_of_them), free_graphs, [stages.abort])
    assert all(each.has_returned.is_set() for each in all_of_them)


def fail() -> bool:
    raise RuntimeError("planted: the device has failed")


@pytest.mark.parametrize("failing", ["connection", "release", "query", "graphs"])
def test_an_abort_that_fails_in_part_does_the_rest(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    """The user sees the error that says why the ranks were lost; an error within the abort is logged."""
    group, nccl = RankGroup(dist.HashStore(), 0, 1, 1.0), NcclGroup()
    group._group = nccl
    released: list[bool] = []

    class Sums:
        def release(self) -> None:
            released.append(failing == "release" and fail())

        def close(self) -> None:
            if failing == "connection":
                fail()

    group._symmetric = cast("Any", Sums())

    def free_graphs() -> None:
        nccl.graphs_freed.set()
        if failing == "graphs":
            fail()

    with caplog.at_level(logging.WARNING):
        group.abort(fail if failing == "query" else nccl.kernels_ended.is_set, free_graphs)
    assert nccl.has_returned.is_set()
    assert len(released) == (0 if failing == "release" else 1)
    assert "planted" in caplog.text


def test_a_collective_of_a_group_that_is_aborted_meanwhile_raises_collective_error() -> None:
    """Another thread may take the group after a collective has looked at it."""

    class Aborted:
        def __init__(self, group: RankGroup) -> None:
            self._group = group

        def allreduce(self, *args: object) -> None:
            self._group.close()
            raise RuntimeError("NCCL communicator was aborted")

        def abort(self) -> None:
            pass

    group = RankGroup(dist.HashStore(), 0, 1, 1.0)
    group._group = Aborted(group)
    with pytest.raises(CollectiveError, match="aborted"):
        group.all_reduce_in_place(torch.ones(1))
    with pytest.raises(CollectiveError, match="closed"):
        group.all_reduce(torch.ones(1))
