"""How many blocks the key/value cache gets."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.scheduling.kv_cache_group import blocks_for

CPU_SHARE = 0.4
"""Share of the machine's free memory the cache may take on the CPU."""

CPU_ENOUGH_BYTES = 4 * 2**30
"""What the CPU's cache gets at most unasked, unless one request needs more."""

GRAPH_BYTES = 3 * 2**29
"""What graphs may take at most: a bucket's activations at the largest capture size, and the graphs themselves."""

GRAPH_SHARE = 0.05
"""Share of a GPU's memory graphs may take."""


def pick_num_blocks(
    *,
    budget_bytes: int,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_kv_blocks: int | None = None,
) -> int:
    """`num_kv_blocks` if given, else as many as `budget_bytes` holds, at most what `max_num_seqs` requests
    of full length need.

    Raises `OutOfMemory`, with the arithmetic, if one request of `max_model_len` tokens would not fit.
    """
    blocks_per_request = blocks_for(max_model_len, block_size)
    num_blocks = budget_bytes // block_bytes if num_kv_blocks is None else num_kv_blocks
    if num_blocks < blocks_per_request:
        have = (
            f"num_kv_blocks={num_kv_blocks}"
            if num_kv_blocks is not None
            else f"{budget_bytes / 2**20:.1f} MiB for the cache hold {max(0, num_blocks)}"
        )
        fits = max(0, num_blocks) * block_size
        raise OutOfMemory(
            f"the key/value cache is too small for one request of max_model_len={max_model_len}: that takes "
            f"{blocks_per_request} blocks of {block_size} tokens at {block_bytes / 2**10:.1f} KiB, "
            f"{blocks_per_request * block_bytes / 2**20:.1f} MiB, and {have}. "
            + (f"Lower max_model_len to at most {fits}, or give" if fits else "Give")
            + " more memory (kv_cache_memory_bytes, num_kv_blocks, gpu_memory_utilization)."
        )
    return min(num_blocks, blocks_per_request * max_num_seqs) if num_kv_blocks is None else num_blocks


def cpu_budget_bytes(request_bytes: int) -> int:
    """`CPU_ENOUGH_BYTES`, or one longest request's `request_bytes`, within `CPU_SHARE` of what is free."""
    free_bytes = min(_machine_free_bytes(), _container_free_bytes())
    return min(int(CPU_SHARE * free_bytes), max(CPU_ENOUGH_BYTES, request_bytes))


def gpu_budget_bytes(device: torch.device, gpu_memory_utilization: float, activation_bytes: int) -> int:
    """What `gpu_memory_utilization` of the GPU leaves after what is in use now and a step's activations."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes * gpu_memory_utilization) - (total_bytes - free_bytes) - activation_bytes


def graph_budget_bytes(device: torch.device) -> int:
    """What the graphs may take of the GPU's memory, set aside before the cache takes the rest; 0 without one."""
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
