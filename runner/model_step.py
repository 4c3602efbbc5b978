"""One step of the model over the fixed buffers: what runs without graphs, between them, or as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from piecegraph.runner.attention.backend import AttentionImpl
from piecegraph.runner.attention.step_metadata import StepMetadata, StepMetadataBuilder
from piecegraph.runner.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.input_buffers import InputBuffers
from piecegraph.runner.kv_cache import KVCache
from piecegraph.runner.kv_cache_groups import KVCacheLayout
from piecegraph.runner.prepare_inputs import prepare_inputs
from piecegraph.runner.request_states import RequestStates
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.sampling.gumbel_sample import gumbel_sample

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(input_ids, positions, logits_indices) -> logits`, the compiled model."""


class StepOutput(NamedTuple):
    """One row a request, padded ones included; rows of requests that do not sample mean nothing."""

    logits: torch.Tensor  # [num_reqs, vocab_size]
    token_ids: torch.Tensor  # [num_reqs] int64, drawn at each request's temperature; recorded in the states


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """The model, its cache, and the buffers it reads. Counts of tokens and requests include padding."""

    forward: Forward
    impl: AttentionImpl
    metadata_builder: StepMetadataBuilder
    layout: KVCacheLayout
    kv_caches: Mapping[str, KVCache]  # by the layer's name; one tensor for all layers that share it
    states: RequestStates
    buffers: InputBuffers
    sampler: Sampler
    block_size: int  # as kernels count: a page of a block that is allocated, or all of it

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What a captured step reads or writes besides the model's own tensors, by name."""
        tensors = [(f"requests' {name}", value) for name, value in self.states.tensors().items()]
        tensors += [("requests' temperature", self.sampler.temperature), ("requests' seeds", self.sampler.seeds)]
        tensors += [(f"input buffer {name}", value) for name, value in vars(self.buffers).items()]
        for layers in self.layout.tensors:
            cache, names = self.kv_caches[layers[0]], ", ".join(layers)
            tensors += [(f"key cache of {names}", cache.key), (f"value cache of {names}", cache.value)]
        return [(name, value) for name, value in tensors if isinstance(value, torch.Tensor)]

    def prepare(self, num_tokens: int, num_reqs: int) -> None:
        """Derive the step's inputs from the states of the rows in `idx_mapping`."""
        prepare_inputs(self.states, self.buffers, num_tokens=num_tokens, num_reqs=num_reqs, block_size=self.block_size)

    def context(self, metadata: StepMetadata, mode: str = "NONE", descriptor: object | None = None) -> ForwardContext:
        """What attention reads in this step. `metadata`: from the builder's `build` or `init_capture`."""
        groups = metadata.groups
        return ForwardContext(
            impl=self.impl,
            metadata=groups[0],
            kv_caches=self.kv_caches,
            group_metadata=groups if len(groups) > 1 else (),
            group_of=self.layout.group_of,
            cudagraph_mode=mode,
            descriptor=descriptor,
        )

    def model_inputs(self, num_tokens: int, num_logits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The model's arguments, views of the fixed buffers."""
        buffers = self.buffers
        return buffers.input_ids[:num_tokens], buffers.positions[:num_tokens], buffers.logits_indices[:num_logits]

    def num_logits(self, num_tokens: int) -> int:
        """Rows of logits a PIECEWISE bucket of `num_tokens` computes: as many requests as it can hold."""
        return min(num_tokens, self.buffers.max_num_reqs)

    def run_uncaptured(
        self, metadata: StepMetadata, num_reqs: int, more_indices: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits `[num_reqs, vocab_size]` of the prepared inputs, by the compiled pieces without graphs.

        `more_indices` `[num_more]` int64: rows of the batch whose logits follow those.
        """
        input_ids, positions, indices = self.model_inputs(metadata.num_tokens, num_reqs)
        if more_indices is not None:
            indices = torch.cat([indices, more_indices])
        with set_forward_context(self.context(metadata)):
            return self.forward(input_ids, positions, indices)

    def prepare_piecewise(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> None:
        """`prepare` for the sizes of these model inputs: what the first graph of a PIECEWISE bucket begins with."""
        self.prepare(input_ids.shape[0], logits_indices.shape[0])

    def draw(self, logits: torch.Tensor) -> StepOutput:
        """A token for every row `[num_reqs, vocab_size]`, at its request's temperature alone, and recorded: how
        every step ends. It is the last word for requests that use no other sampling option."""
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
        """A whole step, from states to recorded tokens: what a FULL graph holds.

        The arguments are views of the fixed buffers, `[num_reqs]`, `[num_reqs + 1]` and `[num_tokens]`;
        only their sizes are read here. Runs inside a forward context of the caller's.
        """
        num_reqs, num_tokens = idx_mapping.shape[0], input_ids.shape[0]
        self.prepare(num_tokens, num_reqs)
        return self.draw(self.forward(*self.model_inputs(num_tokens, num_reqs)))
