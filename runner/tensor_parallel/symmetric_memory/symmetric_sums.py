"""Sums over the GPUs of one host through symmetric memory, which every rank can write in the memory of the others.

NCCL takes some 15 us for the few kilobytes that a decode step adds up, and nothing overlaps with it. The kernel of
`kernels/pushed_sum.py` takes 3. Up to which size it is faster is measured at the start, and all ranks decide alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from piecegraph.runner.tensor_parallel.symmetric_memory.renumbered_store import RenumberedStore

SIZES = tuple(2**power for power in range(13, 23, 2))
"""The sizes in bytes that are measured, 8 KiB to 2 MiB."""

SUMS_A_GRAPH = 20
"""How many sums a measured graph holds, so that its launch is a small part of it."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

POLL_S = 0.001
"""How often the first sum is asked whether it is there."""

TRIAL_S = 30.0
"""How long the first sum may take; a rank may compile its kernel meanwhile."""


class Exchange(Protocol):
    """`RankGroup.exchange`: what each rank gave under a name, by rank."""

    def __call__(self, name: str, value: str) -> list[str]: ...


SumInPlace = Callable[[torch.Tensor], object]


class SymmetricSums:
    """An inbox on each rank that the others write, and the size up to which sums go through it.

    The ranks call the methods at about the same time, as they do those of a process group, and `measure` first.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, name: str) -> None:
        """Allocate the inboxes, and let the ranks write each other's. Raises `RuntimeError` if torch cannot.

        `name`: the same on all ranks, and used once in a process.
        """
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed_sum import BLOCK

        self._name = cast("Any", name)
        store = RenumberedStore(dist.PrefixStore("symmetric memory", store))
        self._named = dist.ProcessGroup(store, rank, size)  # torch looks for its store by name, and keeps no reference
        self._store = store  # whose methods are Python's
        _register_process_group(self._name, self._named)
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self._capacity = SIZES[-1] // 4
        shape = (2, size, self._capacity)
        strides = (size * self._capacity, self._capacity, 1)
        self._inbox = _SymmetricMemory.empty_strided_p2p(shape, strides, torch.int64, device)
        self._handle = _SymmetricMemory.rendezvous(self._inbox, self._name)
        self._inbox.zero_()
        self._inboxes = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._counts = torch.zeros(self._capacity // BLOCK, dtype=torch.int32, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._rank, self._device = rank, device
        torch.cuda.synchronize(device)
        self._most_bytes = 0
        self._fault = ""
        self.microseconds: dict[int, tuple[float, float]] = {}
        """What a sum takes by size in bytes: through symmetric memory, and through NCCL."""

    def measure(self, exchange: Exchange, nccl: SumInPlace) -> None:
        """Choose the size up to which `takes` is true. `nccl` replaces a tensor by the sum over the ranks."""
        exchange("inboxes are clear", "")
        self._fault = next(filter(None, exchange("faults of symmetric memory", self._try())), "")
        if self._fault:
            return
        self.microseconds = self._measured(exchange, nccl)
        self._most_bytes = largest_faster_size(self.microseconds)

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is added up through symmetric memory, by its size alone: all ranks agree."""
        return x.dtype in DTYPES and x.nbytes <= self._most_bytes and x.nbytes % 4 == 0

    def add_up(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Write the sum of `x` over the ranks to `output`, both contiguous and alike, or the same tensor.

        At most `SIZES[-1]` bytes. The bits are equal on all ranks: they are added in the order of the ranks.
        """
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed_sum import push_and_add_up

        if x.data_ptr() % 4 or output.data_ptr() % 4:  # a view from an odd number of two bytes on
            aligned = torch.empty_like(x)
            self.add_up(aligned.copy_(x), aligned)
            output.copy_(aligned)
            return
        push_and_add_up(x, output, self._inboxes, self._counts, self._stop, self._capacity, self._rank)

    def close(self) -> None:
        """Forget the name of the group. Idempotent."""
        from torch._C._distributed_c10d import _unregister_process_group

        name, self._name = self._name, ""
        if name:
            _unregister_process_group(name)

    def release(self) -> None:
        """Make kernels of this GPU wait for no rank any more, those that wait and all later ones.

        What they compute is worthless. They still use the memory of this object, which must be kept until they end.
        """
        self._stop.fill_(1)

    def describe(self) -> str:
        """Return one line: up to which size, and what sums take beside NCCL."""
        if self._fault:
            return f"sums over the ranks: NCCL; {self._fault}"
        times = ", ".join(
            f"{size // 1024} KiB {own:.1f} ({nccl:.1f})" for size, (own, nccl) in self.microseconds.items()
        )
        if not self._most_bytes:
            return f"sums over the ranks: NCCL; through symmetric memory they take no less, in us (NCCL): {times}"
        until = f"through symmetric memory up to {self._most_bytes // 1024} KiB, else NCCL"
        return f"sums over the ranks: {until}, in us (NCCL): {times}"

    def _try(self) -> str:
        """Return what is wrong with sums of small integers, which are exact in any order, or "".

        There is a sum of each dtype, so that no kernel has to be compiled or loaded later, in a capture or while the
        GPU waits for another rank.
        """
        count = SIZES[-1] // 4
        seeds = [torch.Generator().manual_seed(rank) for rank in range(len(self._inboxes))]
        parts = torch.stack([torch.randint(-8, 9, (count,), generator=seed) for seed in seeds]).to(self._device)
        found = []
        for dtype in DTYPES:
            x = parts[self._rank].to(dtype)
            self.add_up(x, x)
            found.append(x)
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + TRIAL_S
        while not event.query():
            if time.monotonic() > deadline:
                self._stop.fill_(1)
                return f"nothing reached rank {self._rank} through symmetric memory within {TRIAL_S:g} s"
            time.sleep(POLL_S)
        is_right = all(torch.equal(x, parts.sum(0).to(x.dtype)) for x in found)
        return "" if is_right else f"rank {self._rank} has a wrong sum through symmetric memory"

    def _measured(self, exchange: Exchange, nccl: SumInPlace) -> dict[int, tuple[float, float]]:
        """Return the microseconds of a sum by size; of the slowest rank, so that all ranks have the same."""
        own: dict[str, tuple[float, float]] = {}
        for size in SIZES:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=self._device)
            pushed = _microseconds(partial(self.add_up, x, x), self._device)
            own[str(size)] = pushed, _microseconds(partial(nccl, x), self._device)
        found = [json.loads(text) for text in exchange("times of sums", json.dumps(own))]
        return {int(size): (max(each[size][0] for each in found), max(each[size][1] for each in found)) for size in own}


def largest_faster_size(microseconds: Mapping[int, tuple[float, float]]) -> int:
    """Return the largest size up to which the first time is below the second for every size; 0 if for none."""
    largest = 0
    for size, (own, other) in sorted(microseconds.items()):
        if own >= other:
            break
        largest = size
    return largest


def why_not_symmetric(hosts: Sequence[str], num_gpus: int, can_access: Callable[[int, int], bool]) -> str:
    """Return why the ranks cannot read each other's memory, or "".

    `hosts`: of each rank; `num_gpus`: how many GPUs this process sees, numbered as the ranks of one host are.
    """
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if num_gpus < len(hosts):
        return f"{num_gpus} GPUs are visible to {len(hosts)} ranks"
    pairs = [(one, other) for one in range(len(hosts)) for other in range(len(hosts)) if one != other]
    blind = next((pair for pair in pairs if not can_access(*pair)), None)
    return "" if blind is None else f"GPU {blind[0]} cannot read the memory of GPU {blind[1]}"


def _microseconds(add_up: Callable[[], object], device: torch.device) -> float:
    """Return what one of the sums of a captured graph takes: the difference of a long graph and a short one.

    So what a launch takes, and the wait for the other ranks to launch theirs, is in neither sum.
    """
    add_up()
    torch.cuda.synchronize(device)
    short, long = (_microseconds_of_graph(add_up, count) for count in (SUMS_A_GRAPH, 5 * SUMS_A_GRAPH))
    return (long - short) / (4 * SUMS_A_GRAPH)


def _microseconds_of_graph(add_up: Callable[[], object], count: int) -> float:
    """Return what a replay of a graph of `count` sums takes."""
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            add_up()
    found: list[float] = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) * 1000)
    return min(found[1:])
