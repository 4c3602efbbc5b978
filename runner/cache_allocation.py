"""The key/value cache, from what may be spent to its final number of blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.cuda_memory import CudaMemoryDriver, MemoryDriver, unavailable_reason
from piecegraph.runner.kv_cache import KVCache
from piecegraph.runner.kv_memory import GrowingMemory
from piecegraph.runner.memory import (
    MemoryBudget,
    cpu_budget_bytes,
    gpu_budget,
    graph_budget_bytes,
    max_graph_bytes,
    pick_num_blocks,
    with_graphs,
)

logger = logging.getLogger(__name__)

AllocateCaches = Callable[..., dict[str, KVCache]]
"""`(num_blocks, *, empty=torch.empty) -> caches by the layer's name`, a new dict. How they are laid out is its own
affair, but for their first dimension: it counts blocks, or equal parts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """What the number of blocks depends on besides memory."""

    block_size: int  # tokens
    block_bytes: int  # of one block in all tensors
    blocks_per_request: int  # of `max_model_len` tokens, at most
    max_model_len: int
    max_num_seqs: int

    @property
    def request_bytes(self) -> int:
        """One request of `max_model_len` tokens."""
        return self.blocks_per_request * self.block_bytes

    def pick_num_blocks(
        self, budget_bytes: int, *, num_kv_blocks: int | None = None, budget: MemoryBudget | None = None
    ) -> int:
        """`memory.pick_num_blocks` for these sizes."""
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
    """The cache's tensors, over which graphs are captured, and how many of their blocks may be used in the end.

    Either all of it was allocated at once, with a fixed reserve for graphs, or addresses are reserved for the most
    blocks there could be, and `fill` gives memory to as many as fit beside the graphs that were captured meanwhile.
    """

    def __init__(
        self,
        *,
        kv_caches: dict[str, KVCache],
        num_blocks: int,
        sizes: CacheSizes,
        max_graph_bytes: int | None = None,
        budget: MemoryBudget | None = None,
        memory: GrowingMemory | None = None,
    ) -> None:
        """`num_blocks`: of the tensors. `memory`: what they grow in, `budget` then being the one before capture."""
        self.kv_caches = kv_caches
        """By the layer's name. `fill` replaces the tensors in it, at the same addresses."""
        self.max_graph_bytes = max_graph_bytes
        """What graphs may take; None: no limit."""
        self.budget = budget
        """How the size came about; None: it was given, or there is no GPU."""
        self._num_blocks = num_blocks
        self._sizes = sizes
        self._memory = memory

    @property
    def is_growing(self) -> bool:
        """`fill` has not run yet and has something to do."""
        return self._memory is not None

    @property
    def num_blocks(self) -> int:
        """Of every tensor in `kv_caches`; while `is_growing`, the most there can be."""
        return self._num_blocks

    def fill(self, used_bytes: int, graph_bytes: int) -> int:
        """The final number of blocks, all of them usable, once nothing else will be allocated for good.

        `used_bytes` of the device are in use, `graph_bytes` of them by graphs. After this the tensors in
        `kv_caches` end where the memory does. Raises `OutOfMemory`, with the arithmetic, if one request of full
        length would not fit. Does nothing the second time, or if all was allocated at once.
        """
        memory = self._memory
        if memory is None:
            return self._num_blocks
        assert self.budget is not None, "what grows has a budget"
        budget = with_graphs(self.budget, used_bytes=used_bytes - memory.mapped_bytes, graph_bytes=graph_bytes)
        usable_bytes = memory.blocks_within(budget.cache_bytes) * self._sizes.block_bytes
        num_blocks = min(self._sizes.pick_num_blocks(usable_bytes, budget=budget), self._num_blocks)
        try:
            memory.grow(num_blocks)
        except OutOfMemory as error:
            raise OutOfMemory(f"{error} {budget}.") from error
        for name, cache in self.kv_caches.items():
            rows = num_blocks * (cache.key.shape[0] // self._num_blocks)
            self.kv_caches[name] = replace(cache, key=cache.key[:rows], value=cache.value[:rows])
        self.budget, self._num_blocks, self._memory = budget, num_blocks, None
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
) -> CacheAllocation:
    """A cache of `num_blocks`, all of which have memory. Raises `OutOfMemory` if there is too little."""
    try:
        kv_caches = allocate(num_blocks)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"a key/value cache of {num_blocks} blocks takes {num_blocks * sizes.block_bytes / 2**20:.1f} MiB, more "
            f"than {device} has left ({error}). Lower num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization."
        ) from error
    return CacheAllocation(
        kv_caches=kv_caches, num_blocks=num_blocks, sizes=sizes, max_graph_bytes=max_graph_bytes, budget=budget
    )


def reserve(allocate: AllocateCaches, sizes: CacheSizes, budget: MemoryBudget, driver: MemoryDriver) -> CacheAllocation:
    """A cache to be filled: addresses for all that `budget`, which has no graphs in it yet, allows.

    Raises `OutOfMemory`, with the arithmetic, if one request of full length would not fit.
    """
    num_blocks = sizes.pick_num_blocks(budget.cache_bytes, budget=budget)
    memory = GrowingMemory(driver)
    try:
        kv_caches = allocate(num_blocks, empty=memory.empty)
    except OutOfMemory as error:
        memory.close()
        raise OutOfMemory(f"{error} {budget}.") from error
    return CacheAllocation(
        kv_caches=kv_caches,
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
) -> CacheAllocation:
    """A cache of a size that was asked for, or of the CPU's; `num_kv_blocks` wins over `kv_cache_memory_bytes`."""
    if kv_cache_memory_bytes is not None:
        budget_bytes = kv_cache_memory_bytes
    else:
        budget_bytes = cpu_budget_bytes(sizes.request_bytes) if device.type == "cpu" else 0
    num_blocks = sizes.pick_num_blocks(budget_bytes, num_kv_blocks=num_kv_blocks)
    graph_bytes = graph_budget_bytes(device) if has_graphs else 0
    return allocate_at_once(allocate, sizes, device, num_blocks, max_graph_bytes=graph_bytes or None)


def allocate_on_gpu(
    allocate: AllocateCaches,
    sizes: CacheSizes,
    device: torch.device,
    *,
    gpu_memory_utilization: float,
    step_bytes: int,
    has_graphs: bool,
) -> CacheAllocation:
    """A cache of what `gpu_memory_utilization` leaves after all else, of which nothing but the graphs may be
    allocated later. Without virtual memory a reserve for graphs is set aside instead of what they will take."""
    reason = unavailable_reason(device)
    if reason is None:
        budget = gpu_budget(device, gpu_memory_utilization, step_bytes=step_bytes)
        return reserve(allocate, sizes, budget, CudaMemoryDriver(device))
    logger.info("the cache is allocated before the graphs: %s", reason)
    graph_bytes = graph_budget_bytes(device) if has_graphs else 0
    budget = gpu_budget(device, gpu_memory_utilization, step_bytes=step_bytes, graph_bytes=graph_bytes)
    num_blocks = sizes.pick_num_blocks(budget.cache_bytes, budget=budget)
    return allocate_at_once(allocate, sizes, device, num_blocks, max_graph_bytes=graph_bytes or None, budget=budget)
