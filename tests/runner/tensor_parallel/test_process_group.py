"""Ranks over gloo, here as threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from piecegraph.errors import ConfigError, WorkerError
from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.tensor_parallel.parallel import graph_facts, rank_facts, weights_digest
from piecegraph.runner.tensor_parallel.process_group import RankGroup

CPU = torch.device("cpu")


def in_threads(num_ranks: int, run: Callable[[RankGroup], object], timeout_s: float = 60.0) -> list[object]:
    """Call `run` for each rank in a thread, and return its result or its error, by rank."""
    store = dist.HashStore()
    found: list[object] = [None] * num_ranks

    def work(rank: int) -> None:
        group = RankGroup(store, rank, num_ranks, timeout_s)
        try:
            found[rank] = run(group)
        except Exception as error:
            found[rank] = error
        finally:
            group.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_collectives_give_every_rank_the_same() -> None:
    def run(group: RankGroup) -> tuple[list[list[float]], int]:
        group.connect(CPU)
        x = torch.full((2, 3), group.rank + 1.0).T  # of other strides
        added, joined, own = group.all_reduce(x), group.all_gather(x[:1]), x.clone().T
        assert torch.equal(x, torch.full((3, 2), group.rank + 1.0))
        group.all_reduce_in_place(own)
        found = [each.flatten().tolist() for each in (added, own, joined)]
        return found, group.smallest("blocks", 10 - group.rank)

    assert in_threads(3, run) == [([[6.0] * 6, [6.0] * 6, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]], 8)] * 3


def test_a_rank_may_be_late_while_graphs_are_captured_but_not_afterwards() -> None:
    def sum_of(group: RankGroup) -> float:
        if group.rank == 1:
            time.sleep(1.0)
        return group.all_reduce(torch.ones(1)).item()

    def run(group: RankGroup) -> float:
        group.connect(CPU)
        with group.capturing():
            late = sum_of(group)
        group.exchange("captured", "")
        with pytest.raises(CollectiveError):
            sum_of(group)
        return late

    assert in_threads(2, run, timeout_s=0.3) == [2.0, 2.0]


def test_ranks_that_differ_are_refused_by_name() -> None:
    def run(group: RankGroup) -> None:
        group.agree("facts", {"set of weights": "a" if group.rank < 2 else "b", "version of torch": "2"})

    errors = in_threads(3, run)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert "rank 2 has another set of weights than rank 0 (b, and a)" in str(errors[0])


def test_a_rank_that_does_not_come_ends_the_others() -> None:
    """Rank 1 connects, and takes no part in what follows."""
    store = dist.HashStore()
    groups = [RankGroup(store, rank, 2, 0.5) for rank in range(2)]
    other = threading.Thread(target=groups[1].connect, args=(CPU,))
    other.start()
    groups[0].connect(CPU)
    other.join()
    with pytest.raises(CollectiveError):
        groups[0].all_reduce(torch.ones(1))
    for group in groups:
        group.close()
        group.close()
    with pytest.raises(CollectiveError, match="closed"):
        groups[0].all_reduce(torch.ones(1))


def test_the_digest_of_weights_changes_with_size_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(5000))
    digests = [weights_digest([file])]
    file.write_bytes(bytes(5001))
    digests.append(weights_digest([file]))
    file.write_bytes(bytes(5000)[:-1] + b"\1")
    digests.append(weights_digest([file]))
    file.write_bytes(b"")
    digests.append(weights_digest([file]))
    assert len(set(digests)) == 4
    facts = rank_facts([file], config="a")
    assert facts != rank_facts([file], config="b")
    assert graph_facts("a") != graph_facts("b")
    assert facts == rank_facts([file], config="a")


def test_a_rank_that_ends_before_it_connects_is_not_waited_for() -> None:
    """The library would wait for the group's timeout; what the rank looks at meanwhile ends its wait."""
    store = dist.HashStore()
    store.set("connects/1", "")  # and then it ended
    looks: list[None] = []

    def check() -> None:
        looks.append(None)
        if len(looks) > 3:
            raise WorkerError("rank 1 ended")

    group = RankGroup(store, 0, 2, 20.0, check=check)
    with pytest.raises(WorkerError, match="rank 1 ended"):
        group.connect(CPU)
