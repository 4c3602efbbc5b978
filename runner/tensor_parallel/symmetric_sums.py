"""Sums over the GPUs of one host through symmetric memory: each rank reads the others' values where they are.

NCCL takes some 20 us for the few kilobytes that a decode step adds up; a kernel that reads the other GPUs over NVLink
takes a part of that. The kernels are torch's (`torch.distributed._symmetric_memory`): one-shot, where each rank adds up
everything, and two-shot, where each rank adds up its part and then reads those of the others. Which of them, or NCCL,
is the fastest for a size is measured at the start, and all ranks decide alike.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

NCCL, ONE_SHOT, TWO_SHOT = "NCCL", "one-shot", "two-shot"

SIZES = tuple(2**power for power in range(13, 23, 2))
"""The sizes in bytes that are measured, 8 KiB to 2 MiB; a sum takes what is best for the next larger one."""

SUMS_A_GRAPH = 20
"""How many sums a measured graph holds, so that its launch is a small part of it."""


class Exchange(Protocol):
    """`RankGroup.exchange`: what each rank gave under a name, by rank."""

    def __call__(self, name: str, value: str) -> list[str]: ...


SumInPlace = Callable[[torch.Tensor], object]


class SymmetricSums:
    """A buffer on each rank that the others read, and the way in which a sum of each size is made.

    The ranks call the methods at about the same time, as they do those of a process group, and `measure` first.
    Kernels that wait for a lost rank wait for good: `release` should end them, but on two H100 it did not.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, name: str) -> None:
        """Allocate the buffers, and let the ranks see each other's. Raises `RuntimeError` if torch cannot.

        `name`: the same on all ranks, and used once in a process.
        """
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        self._name = cast("Any", name)
        store = dist.PrefixStore("symmetric memory", store)
        self._named = dist.ProcessGroup(store, rank, size)  # torch looks for its store by name, and keeps no reference
        _register_process_group(self._name, self._named)
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self._buffer = _SymmetricMemory.empty_strided_p2p((SIZES[-1],), (1,), torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(self._buffer, self._name)
        self._rank, self._size, self._device = rank, size, device
        words = self._handle.signal_pad_size // 4
        self._pads = [self._handle.get_signal_pad(each, (words,), torch.int32) for each in range(size)]
        self._pads[rank].fill_(0)  # loads the kernel of `release`, in case none can be loaded while others wait
        self._release_stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        self._ways: dict[int, str] = {}
        self.microseconds: dict[int, dict[str, float]] = {}
        """What a sum takes: by size in bytes, then by way."""

    def measure(self, exchange: Exchange, nccl: SumInPlace) -> None:
        """Choose the way for each size. `nccl` replaces a tensor by the sum over the ranks."""
        exchange("signal pads are clear", "")
        self.microseconds = self._measured(exchange, nccl)
        self._ways = fastest_ways(self.microseconds)

    def way(self, x: torch.Tensor) -> str:
        """Return how a contiguous tensor is added up: NCCL, ONE_SHOT or TWO_SHOT."""
        if x.dtype not in (torch.float32, torch.bfloat16) or x.nbytes % (16 * self._size) or x.data_ptr() % 16:
            return NCCL
        return next((way for size, way in self._ways.items() if x.nbytes <= size), NCCL)

    def add_up(self, x: torch.Tensor, output: torch.Tensor, way: str) -> None:
        """Write the sum of `x` over the ranks to `output`, of the same shape and dtype, or the same tensor."""
        staged = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        if way == ONE_SHOT:
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(staged, x, "sum", self._name, output)
        else:
            staged.copy_(x)
            torch.ops.symm_mem.two_shot_all_reduce_out(staged, "sum", self._name, output)

    def close(self) -> None:
        """Forget the name of the group. Idempotent."""
        from torch._C._distributed_c10d import _unregister_process_group

        name, self._name = self._name, ""
        if name:
            _unregister_process_group(name)

    def release(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Let kernels of this GPU that wait for lost ranks go on until `is_done`, or `deadline` of `time.monotonic`.

        What they compute is worthless. A kernel waits until a word that another rank sets is there, and until one that
        another rank clears is gone. On two H100 the kernels were seen to wait on nevertheless, and the reason is not
        known; that is why these sums are off unless `PIECEGRAPH_SYMMETRIC_SUMS` is set.
        """
        with torch.cuda.stream(self._release_stream):
            while not is_done() and time.monotonic() < deadline:
                for rank, pad in enumerate(self._pads):
                    pad.fill_(int(rank == self._rank))
                self._release_stream.synchronize()

    def describe(self) -> str:
        """Return one line: the way of each size, and what it takes beside NCCL."""
        if not self._ways:
            return "sums over the ranks: NCCL, which is the fastest for every size"
        parts = [
            f"up to {size // 1024} KiB {way}, {self.microseconds[size][way]:.1f} us (NCCL "
            f"{self.microseconds[size][NCCL]:.1f})"
            for size, way in self._ways.items()
        ]
        return f"sums over the ranks: {'; '.join(parts)}; larger ones NCCL"

    def _measured(self, exchange: Exchange, nccl: SumInPlace) -> dict[int, dict[str, float]]:
        """Return the microseconds of a sum, by size and way; of the slowest rank, so that all ranks have the same."""
        own: dict[str, dict[str, float]] = {}
        equal = [way for way in (ONE_SHOT, TWO_SHOT) if self._gives_all_ranks_the_same(way, exchange)]
        for size in SIZES:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=self._device)
            ways: dict[str, Callable[[], object]] = {NCCL: partial(nccl, x)}
            ways |= {way: partial(self.add_up, x, x, way) for way in equal}
            own[str(size)] = {way: _microseconds(add_up, self._device) for way, add_up in ways.items()}
        found = [json.loads(text) for text in exchange("times of sums", json.dumps(own))]
        return {
            int(size): {way: max(each[size][way] for each in found) for way in times} for size, times in own.items()
        }

    def _gives_all_ranks_the_same(self, way: str, exchange: Exchange) -> bool:
        """Return whether the bits of a sum of random numbers are equal on all ranks. Sampling relies on that."""
        generator = torch.Generator().manual_seed(self._rank)
        x = torch.randn(2**16, generator=generator).to(self._device, torch.bfloat16)
        self.add_up(x, x, way)
        digest = hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        return len(set(exchange(f"bits of {way}", digest))) == 1


def fastest_ways(microseconds: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Return the way for each size, ascending, without the sizes from which on NCCL is the fastest."""
    ways = {size: min(times, key=lambda way: times[way]) for size, times in sorted(microseconds.items())}
    while ways and ways[max(ways)] == NCCL:
        del ways[max(ways)]
    return ways


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
