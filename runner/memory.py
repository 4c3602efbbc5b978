"""How many blocks the key/value cache gets."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.scheduling.kv_cache_group import blocks_for

CPU_SHARE = 0.4
"""Share of the machine's free memory the cache may take on the CPU."""

CPU_ENOUGH_BYTES = 4 * 2**30
"""What the CPU's cache gets at most unasked, unless one request needs more."""

GRAPH_BYTES = 3 * 2**29
"""What graphs may take at most where the cache cannot grow after them: a bucket's activations at the largest capture
size, and the graphs themselves."""

GRAPH_SHARE = 0.05
"""Share of a GPU's memory graphs may take there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A GPU's memory, each byte under one heading; the key/value cache gets what is left. In bytes.

    Not counted, and so taken from what `utilization` leaves: log probabilities of whole prompts, or of the whole
    vocabulary, for which some steps make rows of logits that others do not.
    """

    total_bytes: int
    utilization: float  # above 0, at most 1: the share of `total_bytes` that all of this may take
    other_bytes: int  # in use, and not by torch: other processes, CUDA's context, loaded kernels
    model_bytes: int  # held by torch for good: weights, requests' states, input buffers, workspaces
    step_bytes: int  # held only while a step runs without graphs, at its largest; `measure_step`
    graph_bytes: int  # the graphs, and the pool they keep their activations in

    @property
    def cache_bytes(self) -> int:
        """What the cache gets; below 0 if it is too much already without one."""
        spent = self.other_bytes + self.model_bytes + self.step_bytes + self.graph_bytes
        return int(self.total_bytes * self.utilization) - spent

    def __str__(self) -> str:
        """The arithmetic, in GiB."""
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
    """`num_kv_blocks` if given, else as many as `budget_bytes` holds, at most what `max_num_seqs` requests
    of full length need.

    `blocks_per_request`: what one of `max_model_len` tokens holds at most; with windows, fewer than its tokens fill.
    Raises `OutOfMemory`, with the arithmetic, `budget`'s too if given, if that many do not fit.
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
    """`CPU_ENOUGH_BYTES`, or one longest request's `request_bytes`, within `CPU_SHARE` of what is free."""
    free_bytes = min(_machine_free_bytes(), _container_free_bytes())
    return min(int(CPU_SHARE * free_bytes), max(CPU_ENOUGH_BYTES, request_bytes))


def gpu_budget(
    device: torch.device, gpu_memory_utilization: float, *, step_bytes: int, graph_bytes: int = 0
) -> MemoryBudget:
    """What `device` has in use, before there is a cache, and what a step and the graphs will take besides.

    Waits for the device. Gives memory that torch holds and nobody uses back to it.
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
    """`budget`, made before capture, once `graph_bytes` of graphs are there. `used_bytes` of the GPU are in use now,
    the cache's not counted: the terms add up to them, what nothing else explains being used outside of torch."""
    return replace(budget, graph_bytes=graph_bytes, other_bytes=used_bytes - budget.model_bytes - graph_bytes)


def max_graph_bytes(cache_bytes: int, request_bytes: int) -> int:
    """What graphs may take of the `cache_bytes` they share with the cache: half, and never of the `request_bytes`
    that one request needs."""
    return max(0, min(cache_bytes // 2, cache_bytes - request_bytes))


def graph_budget_bytes(device: torch.device) -> int:
    """What is set aside for graphs where the cache is allocated before them; 0 without a GPU."""
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
