"""Runs the model on a step's requests, then samples: two phases, with the step's output between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.batch import Batch, build_batch, host_batch
from piecegraph.runner.cudagraph_manager import CudaGraphManager
from piecegraph.runner.dispatch_counters import DispatchCounters, refuse_downgrade
from piecegraph.runner.dispatcher import Dispatched, Dispatcher, uniform_token_count
from piecegraph.runner.host_copy import to_device
from piecegraph.runner.model_step import ModelStep, StepOutput
from piecegraph.runner.record_sampled import record_sampled
from piecegraph.runner.sampling.sampler import SamplingInputs, sample
from piecegraph.runner.scheduler import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class _Pending:
    """What `execute_model` left for `sample_tokens`."""

    output: StepOutput
    scheduled: tuple[ScheduledRequest, ...]


class ModelRunner:
    """Owns the requests' device rows, the fixed buffers (in `step`) and the graphs over them."""

    def __init__(
        self,
        *,
        step: ModelStep,
        graphs: CudaGraphManager,
        dispatcher: Dispatcher,
        needs_host_batch: bool,
        strict: bool,
    ) -> None:
        self.step = step
        self.graphs = graphs
        self.dispatcher = dispatcher
        self.counters = DispatchCounters()
        self._needs_host_batch = needs_host_batch
        self._strict = strict
        self._pending: _Pending | None = None

    @torch.no_grad()
    def execute_model(self, step: SchedulerOutput, *, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Compute the scheduled tokens: fills the cache, keeps the output for `sample_tokens`.

        `at_most` forbids modes above it (FULL > PIECEWISE > NONE); every mode gives the same tokens.
        """
        assert self._pending is None, "sample_tokens has not run since the last execute_model"
        for request_id in step.finished:
            self.step.states.remove(request_id)
        for item in step.scheduled:
            request = item.request
            if request.request_id not in self.step.states:
                self.step.states.add(
                    request.request_id,
                    request.token_ids(0, request.num_tokens),
                    request.block_ids,
                    num_computed_tokens=request.num_computed_tokens,
                )
        batch = build_batch(step.scheduled)
        dispatched = self.dispatch(batch, at_most)
        self._pending = _Pending(self.run(batch, dispatched, step.scheduled), step.scheduled)

    def dispatch(self, batch: Batch, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> Dispatched:
        """How a batch will run, counted. Raises if that is a downgrade and the runner is strict."""
        dispatched = self.dispatcher.dispatch(
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            uniform_token_count=uniform_token_count(batch.query_lens),
            at_most=at_most,
        )
        refuse_downgrade(dispatched, self._strict)
        self.counters.record(dispatched, batch.num_tokens)
        return dispatched

    def run(self, batch: Batch, dispatched: Dispatched, scheduled: tuple[ScheduledRequest, ...] = ()) -> StepOutput:
        """Run a batch of requests that have rows; the likeliest tokens are recorded in their states.

        Waits for nothing; a batch equal to the one before copies nothing to the device. `scheduled` is
        read only if the backend plans on the host.
        """
        step = self.step
        step.buffers.fill([step.states.row(request_id) for request_id in batch.request_ids], batch.query_lens)
        descriptor = dispatched.descriptor
        if dispatched.mode is CUDAGraphMode.FULL:
            return self.graphs.replay_full(descriptor)
        metadata = step.metadata_builder.build(
            step.buffers.metadata(
                num_tokens=descriptor.num_tokens,
                num_reqs=batch.num_reqs,
                max_query_len=batch.max_query_len,
                num_decode_reqs=batch.num_decode_reqs,
                host=host_batch(scheduled, step.block_size, descriptor.num_tokens) if self._needs_host_batch else None,
            )
        )
        if dispatched.mode is CUDAGraphMode.PIECEWISE:
            return self.graphs.replay_piecewise(descriptor, metadata)
        step.prepare(descriptor.num_tokens, batch.num_reqs)
        return step.pick_greedy(step.run_uncaptured(metadata, batch.num_reqs))

    @torch.no_grad()
    def sample_tokens(self) -> list[int]:
        """The next token of each request that samples in this step, in its order."""
        assert self._pending is not None, "execute_model has not run"
        pending, self._pending = self._pending, None
        sampled = [i for i, item in enumerate(pending.scheduled) if item.is_sampled]
        if not sampled:
            return []
        requests = [pending.scheduled[i].request for i in sampled]
        output, num_reqs = pending.output, len(pending.scheduled)
        if all(request.sampling_params.is_greedy for request in requests):
            greedy = output.greedy[:num_reqs].tolist()
            return [greedy[i] for i in sampled]
        inputs = SamplingInputs(
            params=tuple(request.sampling_params for request in requests),
            seeds=tuple(request.seed for request in requests),
            positions=tuple(request.num_tokens for request in requests),
        )
        if len(sampled) == num_reqs:
            tokens = sample(output.logits[:num_reqs], inputs)
            recorded = tokens
        else:
            rows = to_device(sampled, torch.int64, output.logits.device)
            tokens = sample(output.logits[rows], inputs)
            recorded = output.greedy[:num_reqs].clone()
            recorded[rows] = tokens
        record_sampled(self.step.states, self.step.buffers, recorded, num_reqs=num_reqs)
        return [int(token) for token in tokens.tolist()]

    def reset(self) -> None:
        """Drop a step that was executed but never sampled (an error came between).

        Rows are given up: the device may be a step ahead of the host, whose word counts.
        """
        self._pending = None
        self.step.states.clear()

    def close(self) -> None:
        """Free the graphs; harmless when repeated."""
        self.graphs.close()
