"""Runs the model on a step's requests, then samples: two phases, with the logits between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from piecegraph.runner.attention.backend import AttentionImpl, AttentionMetadataBuilder
from piecegraph.runner.batch import build_batch
from piecegraph.runner.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.kv_cache import KVCache
from piecegraph.runner.sampling.sampler import SamplingInputs, sample
from piecegraph.runner.scheduler import ScheduledRequest, SchedulerOutput

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(input_ids, positions, logits_indices) -> logits`, the compiled model."""


class ModelRunner:
    """Owns the caches. Between `execute_model` and `sample_tokens` it holds the step's logits."""

    def __init__(
        self,
        *,
        forward: Forward,
        impl: AttentionImpl,
        metadata_builder: AttentionMetadataBuilder,
        kv_caches: Mapping[str, KVCache],
        block_size: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._impl = impl
        self._metadata_builder = metadata_builder
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._device = device
        self._pending: tuple[torch.Tensor, tuple[ScheduledRequest, ...]] | None = None

    @torch.no_grad()
    def execute_model(self, step: SchedulerOutput) -> None:
        """Compute the scheduled tokens: fills the cache, keeps the logits for `sample_tokens`."""
        assert self._pending is None, "sample_tokens has not run since the last execute_model"
        batch = build_batch(step.scheduled, self._block_size, self._device)
        context = ForwardContext(
            impl=self._impl,
            metadata=self._metadata_builder.build(batch.attention),
            kv_caches=self._kv_caches,
        )
        with set_forward_context(context):
            logits = self._forward(batch.input_ids, batch.positions, batch.logits_indices)
        self._pending = (logits, step.sampled)

    @torch.no_grad()
    def sample_tokens(self) -> list[int]:
        """The next token of each request in `step.sampled`, in its order."""
        assert self._pending is not None, "execute_model has not run"
        (logits, sampled), self._pending = self._pending, None
        if not sampled:
            return []
        requests = [item.request for item in sampled]
        inputs = SamplingInputs(
            params=tuple(request.sampling_params for request in requests),
            seeds=tuple(request.seed for request in requests),
            positions=tuple(request.num_tokens for request in requests),
        )
        tokens: list[int] = sample(logits, inputs).tolist()
        return tokens

    def reset(self) -> None:
        """Drop a step that was executed but never sampled (an error came between)."""
        self._pending = None
