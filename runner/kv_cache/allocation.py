"""The allocation of the KV cache, from its memory budget to its final number of blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from piecegraph.errors import OutOfMemory, is_out_of_memory
from piecegraph.runner.attention.interface.kv_cache import LayerCache, split_caches
from piecegraph.runner.device_memory.cuda_memory import CudaMemoryDriver, MemoryDriver, unavailable_reason
from piecegraph.runner.device_memory.growing_memory import GrowingMemory
from piecegraph.runner.kv_cache.budget import (
    MemoryBudget,
    cpu_budget_bytes,
    gpu_budget,
    graph_budget_bytes,
    max_graph_bytes,
    pick_num_blocks,
    with_graphs,
)

logger = logging.getLogger(__name__)

AllocateCaches = Callable[..., Mapping[str, LayerCache]]
"""A function `(num_blocks, *, empty=torch.empty)` that returns a new dict of caches by the layer's name. The first
dimension of each tensor is the number of blocks, or a multiple of it; the other dimensions are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """The sizes on which the number of blocks depends, besides memory."""

    block_size: int  # tokens
    block_bytes: int  # of one block in all tensors
    blocks_per_request: int  # the largest number for a request of `max_model_len` tokens
    max_model_len: int
    max_num_seqs: int

    @property
    def request_bytes(self) -> int:
        """The number of bytes for one request of `max_model_len` tokens."""
        return self.blocks_per_request * self.block_bytes

    def pick_num_blocks(
        self, budget_bytes: int, *, num_kv_blocks: int | None = None, budget: MemoryBudget | None = None
    ) -> int:
        """Return `budget.pick_num_blocks` for these sizes."""
        return pick_num_blocks(
            budget_bytes=budget_bytes,
            block_bytes=self.block_bytes,
            block_size=self.block_size,
            blocks_per_request=self.blocks_per_request,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            num_kv_blocks=num_kv_blocks,
            budget=budget,
        )


class CacheAllocation:
    """The tensors of the KV cache, over which graphs are captured, and the number of their usable blocks.

    Either all memory was allocated at once, with a fixed reserve for graphs, or addresses are reserved for the largest
    possible number of blocks, and `fill` allocates memory for the blocks that fit beside the captured graphs.
    """

    def __init__(
        self,
        *,
        caches: Mapping[str, LayerCache],
        num_blocks: int,
        sizes: CacheSizes,
        max_graph_bytes: int | None = None,
        budget: MemoryBudget | None = None,
        memory: GrowingMemory | None = None,
    ) -> None:
        """Store the parts.

        `num_blocks`: the number of blocks in the tensors. `memory`: the owner of the tensors' memory, if it can be
        unmapped. With a `budget`, which is then that before capture, it still grows.
        """
        self.kv_caches, self.state_caches = split_caches(caches)
        """The caches of tokens, and those of states, by the layer's name. `fill` replaces the tensors, at the same
        addresses."""
        self.max_graph_bytes = max_graph_bytes
        """The memory limit of graphs in bytes; None: no limit."""
        self.budget = budget
        """The budget that determined the size; None: the size was given, or there is no GPU."""
        self.memory = memory
        """The owner of the tensors' memory; None: torch's allocator is."""
        self._num_blocks = num_blocks
        self._sizes = sizes
        self._is_filled = budget is None or memory is None

    @property
    def is_growing(self) -> bool:
        """Whether `fill` still has memory to allocate."""
        return not self._is_filled

    @property
    def num_blocks(self) -> int:
        """The number of blocks in every tensor of `kv_caches`; while `is_growing`, the largest possible number."""
        return self._num_blocks

    def fill(self, used_bytes: int, graph_bytes: int) -> int:
        """Allocate memory for as many blocks as fit, and return their number, which is final.

        Nothing else may be allocated permanently afterwards. `used_bytes` of the device are in use, `graph_bytes` of
        them by graphs. The tensors in `kv_caches` are cut to the allocated blocks. Raises `OutOfMemory`, with the
        arithmetic, if one request of full length would not fit. Idempotent, and without effect if all memory was
        allocated at once.
        """
        if self._is_filled:
            return self._num_blocks
        memory = self.memory
        assert self.budget is not None and memory is not None, "a growing cache has both"
        budget = with_graphs(self.budget, used_bytes=used_bytes - memory.mapped_bytes, graph_bytes=graph_bytes)
        usable_bytes = memory.blocks_within(budget.cache_bytes) * self._sizes.block_bytes
        num_blocks = min(self._sizes.pick_num_blocks(usable_bytes, budget=budget), self._num_blocks)
        try:
            memory.grow(num_blocks)
        except OutOfMemory as error:
            raise OutOfMemory(f"{error} {budget}.") from error
        for name, cache in self.kv_caches.items():
            self.kv_caches[name] = cache.first_blocks(num_blocks, self._num_blocks)
        for name, states in self.state_caches.items():
            self.state_caches[name] = states.first_blocks(num_blocks, self._num_blocks)
        self.budget, self._num_blocks, self._is_filled = budget, num_blocks, True
        return num_blocks

    def __str__(self) -> str:
        sizes = self._sizes
        text = f"{self._num_blocks} blocks of {sizes.block_size} tokens"
        text += f", {self._num_blocks * sizes.block_bytes / 2**20:.0f} MiB"
        return text if self.budget is None else f"{text}; {self.budget}"


def allocate_at_once(
    allocate: AllocateCaches,
    sizes: CacheSizes,
    device: torch.device,
    num_blocks: int,
    *,
    max_graph_bytes: int | None = None,
    budget: MemoryBudget | None = None,
    driver: MemoryDriver | None = None,
) -> CacheAllocation:
    """Return a cache of `num_blocks` with all memory allocated, by `driver` if there is one. Raises `OutOfMemory`."""
    assert budget is None or driver is None, "a cache with a budget and a driver grows: see `reserve`"
    memory = None if driver is None else GrowingMemory(driver)
    try:
        caches = allocate(num_blocks) if memory is None else allocate(num_blocks, empty=memory.empty)
        if memory is not None:
            memory.grow(num_blocks)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"a key/value cache of {num_blocks} blocks takes {num_blocks * sizes.block_bytes / 2**20:.1f} MiB, more "
            f"than {device} has left ({error}). Lower num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization."
        ) from error
    return CacheAllocation(
        caches=caches, num_blocks=num_blocks, sizes=sizes, max_graph_bytes=max_graph_bytes, budget=budget, memory=memory
    )


def reserve(allocate: AllocateCaches, sizes: CacheSizes, budget: MemoryBudget, driver: MemoryDriver) -> CacheAllocation:
    """Return a growing cache with addresses for all blocks that `budget` allows, in which graphs still count 0.

    Raises `OutOfMemory`, with the arithmetic, if one request of full length would not fit.
    """
    num_blocks = sizes.pick_num_blocks(budget.cache_bytes, budget=budget)
    memory = GrowingMemory(driver)
    try:
        caches = allocate(num_blocks, empty=memory.empty)
    except OutOfMemory as error:
        memory.close()
        raise OutOfMemory(f"{error} {budget}.") from error
    return CacheAllocation(
        caches=caches,
        num_blocks=num_blocks,
        sizes=sizes,
        max_graph_bytes=max_graph_bytes(budget.cache_bytes, sizes.request_bytes),
        budget=budget,
        memory=memory,
    )


def allocate_given(
    allocate: AllocateCaches,
    sizes: CacheSizes,
    device: torch.device,
    *,
    num_kv_blocks: int | None,
    kv_cache_memory_bytes: int | None,
    has_graphs: bool,
    driver: MemoryDriver | None = None,
) -> CacheAllocation:
    """Return a cache of the requested size, or of the CPU's default size.

    `num_kv_blocks` takes precedence over `kv_cache_memory_bytes`. `driver`: allocates memory that can be unmapped;
    None: torch allocates it.
    """
    if kv_cache_memory_bytes is not None:
        budget_bytes = kv_cache_memory_bytes
    else:
        budget_bytes = cpu_budget_bytes(sizes.request_bytes) if device.type == "cpu" else 0
    num_blocks = sizes.pick_num_blocks(budget_bytes, num_kv_blocks=num_kv_blocks)
    graph_bytes = graph_budget_bytes(device) if has_graphs else 0
    return allocate_at_once(allocate, sizes, device, num_blocks, max_graph_bytes=graph_bytes or None, driver=driver)


def allocate_on_gpu(
    allocate: AllocateCaches,
    sizes: CacheSizes,
    device: torch.device,
    *,
    gpu_memory_utilization: float,
    step_bytes: int,
    has_graphs: bool,
) -> CacheAllocation:
    """Return a cache of the memory that `gpu_memory_utilization` leaves after everything but the graphs.

    Only graphs may be allocated afterwards. Without virtual memory management the cache does not grow, and a fixed
    reserve is set aside for graphs.
    """
    reason = unavailable_reason(device)
    if reason is None:
        budget = gpu_budget(device, gpu_memory_utilization, step_bytes=step_bytes)
        return reserve(allocate, sizes, budget, CudaMemoryDriver(device))
    logger.info("the cache is allocated before the graphs: %s", reason)
    graph_bytes = graph_budget_bytes(device) if has_graphs else 0
    budget = gpu_budget(device, gpu_memory_utilization, step_bytes=step_bytes, graph_bytes=graph_bytes)
    num_blocks = sizes.pick_num_blocks(budget.cache_bytes, budget=budget)
    return allocate_at_once(allocate, sizes, device, num_blocks, max_graph_bytes=graph_bytes or None, budget=budget)
