"""A step over buffers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.runner.attention.backend import AttentionBackend
from piecegraph.runner.attention.layer import AttentionLayer
from piecegraph.runner.attention.step_metadata import StepMetadataBuilder
from piecegraph.runner.engine_config import EngineConfig
from piecegraph.runner.input_buffers import InputBuffers
from piecegraph.runner.kv_cache import allocate_kv_caches
from piecegraph.runner.kv_cache_groups import KVCacheLayout
from piecegraph.runner.model_step import Forward, ModelStep
from piecegraph.runner.request_states import RequestStates
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.scheduling.kv_cache_group import blocks_for


def build_step(
    forward: Forward,
    *,
    layers: Sequence[AttentionLayer],
    layout: KVCacheLayout,
    backend: AttentionBackend,
    config: EngineConfig,
    sampler: Sampler,
    max_num_tokens: int,
    device: torch.device,
) -> ModelStep:
    """`forward` as a step of up to `max_num_tokens` tokens, with a cache of one block a layer: how many there can be
    is known once a step has run."""
    max_blocks = blocks_for(sampler.max_model_len, config.block_size)
    block_size = backend.kernel_block_size(config.block_size)
    assert config.block_size % block_size == 0, f"{backend.name}: {block_size} does not divide {config.block_size}"
    pages_per_block = config.block_size // block_size
    num_groups = len(layout.groups)
    return ModelStep(
        forward=forward,
        impl=backend.impl(),
        metadata_builder=StepMetadataBuilder(
            backend.metadata_builder(layers, block_size, device, max_num_reqs=config.max_num_seqs)
        ),
        layout=layout,
        kv_caches=allocate_kv_caches(layers, 1, block_size, device),
        states=RequestStates(
            max_num_reqs=config.max_num_seqs,
            max_model_len=sampler.max_model_len,
            max_blocks=max_blocks,
            num_groups=num_groups,
            pages_per_block=pages_per_block,
            device=device,
            keeps_host_blocks=backend.needs_host_batch,
        ),
        buffers=InputBuffers(
            max_num_tokens=max(max_num_tokens, config.max_num_seqs),
            max_num_reqs=config.max_num_seqs,
            max_blocks=max_blocks * pages_per_block,
            num_groups=num_groups,
            device=device,
        ),
        sampler=sampler,
        block_size=block_size,
    )
