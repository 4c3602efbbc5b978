"""One step of the model over the fixed buffers, in the parts that run without graphs, between graphs or in a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.passes.ops.lora import LoraRows
from piecegraph.runner.attention.interface.backend import AttentionBackend, AttentionImpl
from piecegraph.runner.attention.interface.forward_context import (
    ForwardContext,
    get_forward_context,
    set_forward_context,
)
from piecegraph.runner.attention.interface.kv_cache import (
    KVCache,
    LayerCache,
    StateCache,
    allocate_kv_caches,
    allocate_pages,
    split_caches,
)
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.step_metadata import StepMetadata, StepMetadataBuilder
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.kv_cache.groups import KVCacheLayout
from piecegraph.runner.lora.slot_map import SlotMap
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.scheduling.kv_cache_group import blocks_for
from piecegraph.runner.state_layers.layer import StateLayer
from piecegraph.runner.state_layers.libraries.library_calls import LibraryCall, load_library_call
from piecegraph.runner.state_layers.metadata import StateMetadataBuilder
from piecegraph.runner.state_layers.recent_states import DecodingRows, RecentStates, allocate_recent_states
from piecegraph.runner.step.prepare_inputs import prepare_inputs
from piecegraph.runner.step.prompt_embeds import EmbedsBatch, EmbedsForward
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import RequestStates

Forward = Callable[..., torch.Tensor]
"""The compiled model, `(input_ids, positions, logits_indices) -> logits`; a stage of a pipeline differs."""


class StepOutput(NamedTuple):
    """The output of a step, one row per padded request; rows of requests that do not sample are undefined."""

    logits: torch.Tensor  # [num_reqs, vocab_size]
    token_ids: torch.Tensor  # [num_reqs] int64, sampled at each request's temperature; recorded in the states


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """The model, its KV cache and the buffers that it reads. Counts of tokens and requests include padding."""

    forward: Forward
    impl: AttentionImpl
    metadata_builder: StepMetadataBuilder
    layout: KVCacheLayout
    kv_caches: Mapping[str, KVCache]  # by the layer's name; one tensor for all layers that share it
    state_caches: Mapping[str, StateCache]  # by the layer's name
    recent_states: RecentStates  # of layers whose states can be taken back
    states: RequestStates
    buffers: InputBuffers
    sampler: Sampler
    block_size: int  # the kernels' block size: that of a page of an allocated block
    slot_map: SlotMap | None = None  # None: adapters are not enabled
    embeds_forward: EmbedsForward | None = None  # the model over embeddings; None: prompt embeddings are not enabled

    @property
    def has_logits(self) -> bool:
        """Whether the step ends with logits that tokens are drawn from."""
        return True

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors, with names, that a captured step reads or writes besides the model's own."""
        tensors = [(f"requests' {name}", value) for name, value in self.states.tensors().items()]
        tensors += [("requests' temperature", self.sampler.temperature), ("requests' seeds", self.sampler.seeds)]
        if self.slot_map is not None:
            tensors += list(self.slot_map.tensors().items())
        tensors += [(f"input buffer {name}", value) for name, value in vars(self.buffers).items()]
        for layers in self.layout.tensors if self.layout.page_bytes is None else ():
            cache, names = self.kv_caches[layers[0]], ", ".join(layers)
            tensors += [(f"key cache of {names}", cache.key), (f"value cache of {names}", cache.value)]
        if self.layout.page_bytes is not None:  # every layer has views of its own
            caches: Mapping[str, LayerCache] = {**self.kv_caches, **self.state_caches}
            tensors += [(f"cache of {name}", tensor) for name, cache in caches.items() for tensor in cache.tensors]
        for name, cache in self.kv_caches.items():
            if cache.scales is not None:
                tensors += [(f"{kind} of {name}", tensor) for kind, tensor in cache.scales.tensors().items()]
        for name, recent in self.recent_states.items():
            tensors += [(f"last states of {name}", tensor) for tensor in recent]
        return [(name, value) for name, value in tensors if isinstance(value, torch.Tensor)]

    def prepare(self, num_tokens: int, num_reqs: int, *, num_active_loras: int = 0) -> None:
        """Derive the step's inputs from the states of the rows in `idx_mapping`."""
        prepare_inputs(self.states, self.buffers, num_tokens=num_tokens, num_reqs=num_reqs, block_size=self.block_size)
        if num_active_loras:
            assert self.slot_map is not None, "a request has an adapter, and adapters are not enabled"
            buffers = self.buffers
            self.slot_map.prepare(
                buffers.idx_mapping, buffers.query_start_loc, num_tokens=num_tokens, num_reqs=num_reqs
            )

    def context(
        self,
        metadata: StepMetadata,
        mode: str = "NONE",
        descriptor: BatchDescriptor | None = None,
        lora: LoraRows | None = None,
    ) -> ForwardContext:
        """Return the forward context of a step; `metadata` comes from the builder's `build` or `init_capture`.

        `lora`: the slots of the step's rows; None: they are those of `descriptor`, if it has adapters.
        """
        groups = metadata.groups
        if lora is None and descriptor is not None and descriptor.num_active_loras:
            assert self.slot_map is not None
            lora = self.slot_map.rows(descriptor.num_tokens, self._num_logits_of(descriptor))
        return ForwardContext(
            impl=self.impl,
            metadata=groups[0],
            kv_caches=self.kv_caches,
            state_caches=self.state_caches,
            recent_states=self.recent_states,
            group_metadata=groups if len(groups) > 1 else (),
            group_of=self.layout.group_of,
            cudagraph_mode=mode,
            descriptor=descriptor,
            lora=lora,
        )

    def model_inputs(self, num_tokens: int, num_logits: int) -> tuple[torch.Tensor, ...]:
        """Return the model's arguments, views of the fixed buffers."""
        buffers = self.buffers
        return buffers.input_ids[:num_tokens], buffers.positions[:num_tokens], buffers.logits_indices[:num_logits]

    def num_logits(self, num_tokens: int) -> int:
        """Return the rows of logits that a PIECEWISE bucket of `num_tokens` computes: the requests that it can hold."""
        return min(num_tokens, self.buffers.max_num_reqs)

    def _num_logits_of(self, descriptor: BatchDescriptor) -> int:
        """Return the rows of logits that a bucket computes."""
        return descriptor.num_reqs or self.num_logits(descriptor.num_tokens)

    def run_uncaptured(
        self,
        metadata: StepMetadata,
        num_reqs: int,
        more_indices: torch.Tensor | None = None,
        embeds: EmbedsBatch | None = None,
        *,
        num_active_loras: int = 0,
    ) -> torch.Tensor:
        """Run the model on the prepared inputs without graphs, and return logits `[num_reqs + num_more, vocab_size]`.

        `more_indices` `[num_more]` int64: additional rows of the batch whose logits are returned after the requests'.
        `embeds`: rows that are given as embeddings; the model's own code runs then instead of the compiled pieces.
        `num_active_loras`: as in `BatchDescriptor`; the inputs were prepared with the same number.
        """
        inputs = self.model_inputs(metadata.num_tokens, num_reqs)
        if more_indices is not None:
            inputs = (*inputs[:-1], torch.cat([inputs[-1], more_indices]))
        lora = None
        if num_active_loras:
            assert self.slot_map is not None
            lora = self.slot_map.rows(metadata.num_tokens, num_reqs if more_indices is None else inputs[-1])
        with set_forward_context(self.context(metadata, lora=lora)):
            if embeds is not None:
                assert self.embeds_forward is not None, "checked when the request was added"
                input_ids, positions, indices = inputs
                return self.embeds_forward(input_ids, positions, indices, embeds)
            return self.forward(*inputs)

    def prepare_piecewise(self, *inputs: torch.Tensor) -> None:
        """Run `prepare` for the sizes of these model inputs, at the start of a PIECEWISE bucket's first graph."""
        self.prepare(inputs[0].shape[0], inputs[-1].shape[0], num_active_loras=self._num_active_loras())

    def draw(self, logits: torch.Tensor) -> StepOutput:
        """Sample a token for every row of `logits` `[num_reqs, vocab_size]`, and record the tokens in the states.

        Every step ends with this; only the temperature is applied. The tokens are final for requests that use no
        other sampling option.
        """
        num_reqs, buffers = logits.shape[0], self.buffers
        token_ids = gumbel_sample(
            logits,
            idx_mapping=buffers.idx_mapping[:num_reqs],
            temperature=self.sampler.temperature,
            seeds=self.sampler.seeds,
            positions=buffers.seq_lens[:num_reqs],
            record=self.states.token_record,
        )
        return StepOutput(logits, token_ids)

    def run_whole(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, input_ids: torch.Tensor
    ) -> StepOutput:
        """Run a whole step, from states to recorded tokens, which is the content of a FULL graph.

        The arguments are views of the fixed buffers, `[num_reqs]`, `[num_reqs + 1]` and `[num_tokens]`, of which only
        the sizes are read here. The caller must have entered a forward context.
        """
        num_reqs, num_tokens = idx_mapping.shape[0], input_ids.shape[0]
        self.prepare(num_tokens, num_reqs, num_active_loras=self._num_active_loras())
        return self.draw(self.forward(*self.model_inputs(num_tokens, num_reqs)))

    def _num_active_loras(self) -> int:
        """Return 1 if the current forward context has adapters, else 0."""
        return 0 if self.slot_map is None or get_forward_context().lora is None else 1


def needs_host_batches(backend: AttentionBackend, with_states: Sequence[StateLayer], device: torch.device) -> bool:
    """Return whether a step is planned on the host: layers with states are, where a device must not be waited for."""
    return backend.needs_host_batch or (bool(with_states) and device.type != "cpu")


def build_step(
    forward: Forward,
    *,
    layers: Sequence[AttentionLayer],
    state_layers: Sequence[StateLayer] = (),
    layout: KVCacheLayout,
    backend: AttentionBackend,
    config: EngineConfig,
    sampler: Sampler,
    max_num_tokens: int,
    device: torch.device,
) -> ModelStep:
    """Return a step of up to `max_num_tokens` tokens over new buffers, with a KV cache of one block per layer.

    The final number of blocks is known only after a step has run.
    """
    max_blocks = blocks_for(sampler.max_model_len, config.block_size)
    block_size = backend.kernel_block_size(config.block_size)
    assert config.block_size % block_size == 0, f"{backend.name}: {block_size} does not divide {config.block_size}"
    pages_per_block = config.block_size // block_size
    num_groups = len(layout.groups)
    kv_caches, state_caches = _caches_of_one_block(layers, state_layers, layout, block_size, device)
    rollback = max((layer.rollback for layer in state_layers), default=0)
    states = RequestStates(
        max_num_reqs=config.max_num_seqs,
        max_model_len=sampler.max_model_len,
        max_blocks=max_blocks,
        num_groups=num_groups,
        pages_per_block=pages_per_block,
        device=device,
        keeps_host_blocks=needs_host_batches(backend, state_layers, device),
        keeps_prefill_lens=rollback > 0,
    )
    buffers = InputBuffers(
        max_num_tokens=max(max_num_tokens, config.max_num_seqs),
        max_num_reqs=config.max_num_seqs,
        max_blocks=max_blocks * pages_per_block,
        num_groups=num_groups,
        device=device,
    )
    library_calls = {
        layer.name: load_library_call(layer.prompts.library)
        for layer in state_layers
        if layer.prompts is not None and layer.prompts.library is not None
    }
    decoding = DecodingRows(1 + rollback, buffers.idx_mapping, states.prefill_lens) if rollback else None
    return ModelStep(
        forward=forward,
        impl=backend.impl(),
        metadata_builder=_metadata_builder(
            layers, state_layers, layout, backend, config, block_size, device, decoding, library_calls
        ),
        layout=layout,
        kv_caches=kv_caches,
        state_caches=state_caches,
        recent_states=allocate_recent_states(state_layers, config.max_num_seqs, device),
        states=states,
        buffers=buffers,
        sampler=sampler,
        block_size=block_size,
        slot_map=_slot_map(config, max_num_tokens, device),
    )


def _slot_map(config: EngineConfig, max_num_tokens: int, device: torch.device) -> SlotMap | None:
    if not config.enable_lora:
        return None
    max_num_reqs = config.max_num_seqs
    drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    return SlotMap(
        max_num_tokens=max(max_num_tokens, max_num_reqs),
        max_num_reqs=max_num_reqs,
        max_num_logits=max_num_reqs * (1 + drafts),
        device=device,
    )


def _caches_of_one_block(
    layers: Sequence[AttentionLayer],
    state_layers: Sequence[StateLayer],
    layout: KVCacheLayout,
    block_size: int,
    device: torch.device,
) -> tuple[dict[str, KVCache], dict[str, StateCache]]:
    """Return the caches of tokens and those of states, of one block of `block_size` tokens each."""
    if layout.page_bytes is None:
        return allocate_kv_caches(layers, 1, block_size, device), {}
    caches = allocate_pages(
        (*layers, *state_layers),
        1,
        block_size,
        device,
        tensors=layout.tensors,
        page_bytes=layout.page_bytes,
        kernel_block_size=block_size,
    )
    return split_caches(caches)


def _metadata_builder(
    layers: Sequence[AttentionLayer],
    state_layers: Sequence[StateLayer],
    layout: KVCacheLayout,
    backend: AttentionBackend,
    config: EngineConfig,
    block_size: int,
    device: torch.device,
    decoding: DecodingRows | None,
    library_calls: Mapping[str, LibraryCall],
) -> StepMetadataBuilder:
    """Return the builder of a step's metadata, over kernel blocks of `block_size`."""
    of_attention = backend.metadata_builder(layers, block_size, device, max_num_reqs=config.max_num_seqs)
    if not any(group.is_state for group in layout.groups):
        return StepMetadataBuilder(of_attention)
    of_states = StateMetadataBuilder(
        block_size,
        config.block_size // block_size,
        device,
        decoding,
        library_calls,
        convolves_batches=device.type == "cuda" and any(layer.scan is None for layer in state_layers),
        kernels_run_decodes=device.type == "cuda",
    )
    return StepMetadataBuilder(
        of_attention, tuple(of_states if group.is_state else of_attention for group in layout.groups)
    )
