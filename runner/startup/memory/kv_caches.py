"""The memory of the KV cache at a start, before and after graphs are captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.attention.interface.cache_spec import CachedLayer
from piecegraph.runner.attention.interface.kv_cache import (
    LayerCache,
    allocate_kv_caches,
    allocate_pages,
    as_pages,
    bytes_per_block,
)
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.device_memory.cuda_memory import CudaMemoryDriver
from piecegraph.runner.kv_cache.allocation import CacheAllocation, CacheSizes, allocate_given, allocate_on_gpu
from piecegraph.runner.startup.compiling.compile_model import CompiledLM
from piecegraph.runner.startup.compiling.profile import measure_step
from piecegraph.runner.startup.drafts.draft import (
    CompiledDraft,
)
from piecegraph.runner.step.model_step import ModelStep

if TYPE_CHECKING:
    pass


def allocate_caches(
    model: CompiledLM,
    draft: CompiledDraft | None,
    config: EngineConfig,
    step: ModelStep,
    max_num_tokens: int,
    on_phase: OnPhase | None,
) -> CacheAllocation:
    """Allocate the KV cache.

    All of its memory is allocated if its size is given or there is no GPU; otherwise only as much as capture needs,
    and the rest after the graphs are captured.
    """
    started = time.monotonic()
    of_draft = () if draft is None else draft.cached_layers
    layers: tuple[CachedLayer, ...] = (*model.layers, *model.state_layers, *of_draft)
    layout = model.layout
    device, max_model_len = step.buffers.input_ids.device, step.sampler.max_model_len
    sizes = CacheSizes(
        block_size=config.block_size,
        block_bytes=bytes_per_block(layers, config.block_size, layout.tensors, layout.page_bytes, layout.beside),
        blocks_per_request=layout.blocks_per_request(
            max_model_len, config.block_size, most_changed_tokens(config, max_num_tokens)
        ),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )

    def allocate(num_blocks: int, *, empty: Callable[..., torch.Tensor] = torch.empty) -> Mapping[str, LayerCache]:
        if layout.page_bytes is not None:
            in_pages = allocate_pages(
                layers,
                num_blocks,
                config.block_size,
                device,
                tensors=layout.tensors,
                page_bytes=layout.page_bytes,
                kernel_block_size=step.block_size,
                empty=empty,
            )
            caches = allocate_kv_caches(of_draft, num_blocks, config.block_size, device, empty=empty)
            return {**in_pages, **as_pages(caches, config.block_size // step.block_size)}
        caches = allocate_kv_caches(
            (*model.layers, *of_draft), num_blocks, config.block_size, device, tensors=layout.tensors, empty=empty
        )
        return as_pages(caches, config.block_size // step.block_size)

    has_graphs = model.plan.has_graphs
    if device.type == "cpu" or config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        cache = allocate_given(
            allocate,
            sizes,
            device,
            num_kv_blocks=config.num_kv_blocks,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            has_graphs=has_graphs,
            driver=CudaMemoryDriver(device) if config.enable_sleep_mode and device.type == "cuda" else None,
        )
    else:
        with timed_phase(on_phase, "profile"):
            step_bytes = measure_step(
                step,
                num_tokens=max_num_tokens,
                max_model_len=max_model_len,
                needs_host_batch=model.needs_host_batch,
            )
        cache = allocate_on_gpu(
            allocate,
            sizes,
            device,
            gpu_memory_utilization=config.gpu_memory_utilization,
            step_bytes=step_bytes,
            has_graphs=has_graphs,
        )
    if on_phase is not None and not cache.is_growing:
        on_phase(Phase(name="kv_cache", seconds=time.monotonic() - started, detail=str(cache)))
    return cache


def fill_caches(
    cache: CacheAllocation, graph_bytes: int, set_aside: int, device: torch.device, on_phase: OnPhase | None
) -> None:
    """Allocate the rest of a growing cache after capture.

    `set_aside`: bytes that are left free for graphs which are captured later.
    """
    if not cache.is_growing:
        return
    started = time.monotonic()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)  # torch caches no unused memory after capture
    cache.fill(total_bytes - free_bytes + set_aside, graph_bytes + set_aside)
    if on_phase is not None:
        on_phase(Phase(name="kv_cache", seconds=time.monotonic() - started, detail=str(cache)))


def most_changed_tokens(config: EngineConfig, max_num_tokens: int) -> int:
    """Return the most tokens that a request's computed tokens may change in a step.

    A window's blocks are kept until drafts are verified, those of a step ahead included, and a draft model's slots are
    taken before.
    """
    return max_num_tokens + (3 * config.speculative.num_speculative_tokens if config.speculative else 0)
