"""The memory budget of the KV cache, and the number of blocks that follows from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.scheduling.kv_cache_group import blocks_for

CPU_SHARE = 0.4
"""The share of the machine's free memory that the cache may take on the CPU."""

CPU_ENOUGH_BYTES = 4 * 2**30
"""The largest default size of the cache on the CPU, unless one request needs more."""

GRAPH_BYTES = 3 * 2**29
"""The memory limit of graphs where the cache cannot grow after capture: the activations of a bucket of the largest
capture size, and the graphs themselves."""

GRAPH_SHARE = 0.05
"""The share of a GPU's memory that graphs may take where the cache cannot grow after capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The uses of a GPU's memory, in bytes, each byte counted once; the KV cache gets the rest.

    Log probabilities of whole prompts, or of the whole vocabulary, are not counted, so they use memory that
    `utilization` leaves free: only some steps compute the rows of logits that they need.
    """

    total_bytes: int
    utilization: float  # above 0, at most 1: the share of `total_bytes` that may be used
    other_bytes: int  # used outside of torch: other processes, CUDA's context, loaded kernels
    model_bytes: int  # used permanently by torch: weights, requests' states, input buffers, workspaces
    step_bytes: int  # used only while the largest step runs without graphs; `measure_step`
    graph_bytes: int  # used by the graphs and the pool of their activations

    @property
    def cache_bytes(self) -> int:
        """The number of bytes for the cache; below 0 if the other uses exceed the budget."""
        spent = self.other_bytes + self.model_bytes + self.step_bytes + self.graph_bytes
        return int(self.total_bytes * self.utilization) - spent

    def __str__(self) -> str:
        """Return the arithmetic in GiB."""
        return (
            f"gpu_memory_utilization={self.utilization:g} of {_gib(self.total_bytes)} is "
            f"{_gib(int(self.total_bytes * self.utilization))}; less {_gib(self.other_bytes)} used outside of torch, "
            f"{_gib(self.model_bytes)} of weights and buffers, {_gib(self.step_bytes)} for the largest step and "
            f"{_gib(self.graph_bytes)} of graphs leaves {_gib(self.cache_bytes)}"
        )


def pick_num_blocks(
    *,
    budget_bytes: int,
    block_bytes: int,
    block_size: int,
    blocks_per_request: int,
    max_model_len: int,
    max_num_seqs: int,
    num_kv_blocks: int | None = None,
    budget: MemoryBudget | None = None,
) -> int:
    """Return `num_kv_blocks` if given, else the number of blocks that `budget_bytes` holds.

    The result is at most what `max_num_seqs` requests of full length need. `blocks_per_request`: the largest number of
    blocks that a request of `max_model_len` tokens holds; with sliding windows, fewer than its tokens fill. Raises
    `OutOfMemory`, with the arithmetic and that of `budget` if given, if the cache cannot hold one request.
    """
    num_blocks = budget_bytes // block_bytes if num_kv_blocks is None else num_kv_blocks
    if num_blocks < blocks_per_request:
        have = (
            f"num_kv_blocks={num_kv_blocks}"
            if num_kv_blocks is not None
            else f"{budget_bytes / 2**20:.1f} MiB for the cache hold {max(0, num_blocks)}"
        )
        fits = max(0, num_blocks) * block_size if blocks_per_request == blocks_for(max_model_len, block_size) else 0
        raise OutOfMemory(
            f"the key/value cache is too small for one request of max_model_len={max_model_len}: that takes "
            f"{blocks_per_request} blocks of {block_size} tokens at {block_bytes / 2**10:.1f} KiB, "
            f"{blocks_per_request * block_bytes / 2**20:.1f} MiB, and {have}. "
            + (f"Lower max_model_len to at most {fits}, or give" if fits else "Give")
            + " more memory (kv_cache_memory_bytes, num_kv_blocks, gpu_memory_utilization)."
            + (f" {budget}." if budget is not None else "")
        )
    return min(num_blocks, blocks_per_request * max_num_seqs) if num_kv_blocks is None else num_blocks


def cpu_budget_bytes(request_bytes: int) -> int:
    """Return the larger of `CPU_ENOUGH_BYTES` and `request_bytes`, limited to `CPU_SHARE` of the free memory."""
    free_bytes = min(_machine_free_bytes(), _container_free_bytes())
    return min(int(CPU_SHARE * free_bytes), max(CPU_ENOUGH_BYTES, request_bytes))


def gpu_budget(
    device: torch.device, gpu_memory_utilization: float, *, step_bytes: int, graph_bytes: int = 0
) -> MemoryBudget:
    """Return the budget of `device` before the cache is allocated, with what a step and the graphs will use.

    Waits for the device, and returns unused memory of torch's allocator to the device.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    model_bytes = torch.cuda.memory_reserved(device)
    return MemoryBudget(
        total_bytes=total_bytes,
        utilization=gpu_memory_utilization,
        other_bytes=total_bytes - free_bytes - model_bytes,
        model_bytes=model_bytes,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
    )


def with_graphs(budget: MemoryBudget, *, used_bytes: int, graph_bytes: int) -> MemoryBudget:
    """Return `budget`, which was made before capture, with `graph_bytes` of captured graphs.

    `used_bytes`: the GPU memory in use now without the cache. The terms add up to it, so memory without another
    explanation counts as used outside of torch.
    """
    return replace(budget, graph_bytes=graph_bytes, other_bytes=used_bytes - budget.model_bytes - graph_bytes)


def max_graph_bytes(cache_bytes: int, request_bytes: int) -> int:
    """Return the memory limit of graphs within the `cache_bytes` that they share with the cache.

    The limit is half of it, and leaves the `request_bytes` that one request needs.
    """
    return max(0, min(cache_bytes // 2, cache_bytes - request_bytes))


def graph_budget_bytes(device: torch.device) -> int:
    """Return the reserve for graphs where the cache is allocated before capture; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    return min(GRAPH_BYTES, int(GRAPH_SHARE * torch.cuda.mem_get_info(device)[1]))


def _machine_free_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container_free_bytes() -> int:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # not Linux, or no limit ("max")
        return 2**63


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
