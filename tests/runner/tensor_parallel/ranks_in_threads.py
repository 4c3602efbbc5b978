"""Ranks of one model as threads of one process, which exchange tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from piecegraph.passes.ops.collectives import running_in

T = TypeVar("T")


class ThreadGroup:
    """One rank of several threads."""

    def __init__(self, rank: int, slots: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self.num_collectives = 0
        self._slots = slots
        self._barrier = barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_reduce_in_place(self, x: torch.Tensor) -> None:
        x.copy_(self.all_reduce(x.clone()))  # another rank may read what it was given until it has its sum

    def add_up_and_norm(self, *of_norm: object) -> None:
        """Have no kernel for it."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), -1)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Take each rank for an engine of one rank, here and in `scatter_sum`."""
        return torch.cat(self._exchange(x))

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.num_collectives += 1
        self._slots[self.rank] = x
        self._barrier.wait()
        found = [each for each in self._slots if each is not None]
        self._barrier.wait()
        return found


def run_ranks(num_ranks: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """Call `run` in a thread for each rank at the same time; results by rank. Raises what the first of them raised."""
    slots: list[torch.Tensor | None] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=60.0)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        group = ThreadGroup(rank, slots, barrier)
        try:
            with running_in(group), torch.no_grad():
                results[rank] = run(group)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]
