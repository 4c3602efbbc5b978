"""Runs the model on a step's requests, then samples: two phases, with the step's output between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.async_output import AsyncOutput, OutputStream
from piecegraph.runner.attention.step_metadata import StepMetadata
from piecegraph.runner.batch import Batch, build_batch, host_batch
from piecegraph.runner.cudagraph_manager import CudaGraphManager
from piecegraph.runner.dispatch_counters import DispatchCounters, refuse_downgrade
from piecegraph.runner.dispatcher import Dispatched, Dispatcher, uniform_token_count
from piecegraph.runner.model_step import ModelStep, StepOutput
from piecegraph.runner.prompt_logprobs import PromptLogprobsBatch, PromptLogprobsStates
from piecegraph.runner.sampling.grammar import GrammarOutput, apply_grammar
from piecegraph.runner.sampling.logprobs import LogprobsTensors
from piecegraph.runner.scheduling.scheduler_output import (
    AddedRequest,
    ScheduledDecodes,
    ScheduledRequest,
    SchedulerOutput,
)
from piecegraph.runner.without_grad import without_grad


@dataclass(frozen=True, slots=True)
class _Pending:
    """What `execute_model` left for `sample_tokens`."""

    output: StepOutput
    batch: Batch
    scheduled: Sequence[ScheduledRequest]
    prompt_logprobs: tuple[PromptLogprobsBatch, LogprobsTensors] | None


class ModelRunner:
    """Owns the requests' device rows, the fixed buffers (in `step`) and the graphs over them.

    Neither phase waits for the device; `AsyncOutput.get` does.
    """

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
        self._prompt_logprobs = PromptLogprobsStates()
        self._outputs = OutputStream(step.buffers.input_ids.device)
        self._pending: _Pending | None = None
        self._last_rows: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
        self._last_plain_rows: Sequence[int] | None = None  # that need no sampler; their options are what they were
        self._last_decodes: Batch | None = None
        self._last_dispatched: tuple[Batch, CUDAGraphMode, int, Dispatched] | None = None

    @without_grad
    def execute_model(self, output: SchedulerOutput, *, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Compute the scheduled tokens: fills the cache, keeps the step's output for `sample_tokens`.

        `at_most` forbids modes above it (FULL > PIECEWISE > NONE); every mode gives the same tokens.
        """
        assert self._pending is None, "sample_tokens has not run since the last execute_model"
        self.update_states(output)
        batch = self._batch(output.scheduled)
        prompt_batch = self._prompt_logprobs.batch(output.scheduled)
        if prompt_batch is None:
            dispatched = self.dispatch(batch, at_most)
            self._pending = _Pending(self.run(batch, dispatched, output.scheduled), batch, output.scheduled, None)
            return
        dispatched = self.dispatch(batch, CUDAGraphMode.NONE)  # no graph has logits for every row of a prompt
        made, logprobs = self._run_with_prompt_logits(batch, dispatched, output.scheduled, prompt_batch)
        self._pending = _Pending(made, batch, output.scheduled, (prompt_batch, logprobs))

    def update_states(self, output: SchedulerOutput) -> None:
        """Free, give and extend rows as the scheduler says."""
        step = self.step
        if output.removed or output.added:
            self._forget_rows()
        for request_id in output.removed:
            row = step.states.remove(request_id)
            self._prompt_logprobs.remove(request_id)
            if row is not None:
                step.sampler.remove_request(row)
        for added in output.added:
            self._add(added)
        if output.new_blocks:
            step.states.append_blocks(output.new_blocks)
        step.states.apply_writes()
        step.sampler.apply_staged_writes()

    def dispatch(self, batch: Batch, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> Dispatched:
        """How a batch will run, counted. Raises if that is a downgrade and the runner is strict."""
        last = self._last_dispatched
        if last is not None and last[0] is batch and last[1] is at_most:
            _, _, num_tokens, dispatched = last
        else:
            num_tokens = batch.num_tokens
            dispatched = self.dispatcher.dispatch(
                num_tokens=num_tokens,
                num_reqs=batch.num_reqs,
                uniform_token_count=uniform_token_count(batch.query_lens),
                at_most=at_most,
            )
            self._last_dispatched = batch, at_most, num_tokens, dispatched
        refuse_downgrade(dispatched, self._strict)
        self.counters.record(dispatched, num_tokens)
        return dispatched

    def run(self, batch: Batch, dispatched: Dispatched, scheduled: Sequence[ScheduledRequest] = ()) -> StepOutput:
        """Run a batch of requests that have rows; what is drawn is recorded in their states.

        Waits for nothing; a batch equal to the one before copies nothing to the device. `scheduled` is
        read only if the backend plans on the host.
        """
        step = self.step
        self._fill(batch)
        descriptor = dispatched.descriptor
        if dispatched.mode is CUDAGraphMode.FULL:
            return self.graphs.replay_full(descriptor)
        metadata = self._metadata(batch, dispatched, scheduled)
        if dispatched.mode is CUDAGraphMode.PIECEWISE:
            return self.graphs.replay_piecewise(descriptor, metadata)
        step.prepare(descriptor.num_tokens, batch.num_reqs)
        return step.draw(step.run_uncaptured(metadata, batch.num_reqs))

    @without_grad
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncOutput:
        """The next token of each request that samples in this step, still on its way to the host.

        `grammar_output`: what grammars allow some requests of this step; their log probabilities, too, are of what
        it leaves. All must be scheduled in this step.
        """
        assert self._pending is not None, "execute_model has not run"
        pending, self._pending = self._pending, None
        step, batch = self.step, pending.batch
        num_reqs = batch.num_reqs
        request_ids, at = self._sampled(pending)
        prompt_batch, prompt_logprobs = pending.prompt_logprobs or (None, None)
        token_ids: torch.Tensor | None = None
        logprobs: LogprobsTensors | None = None
        if request_ids:
            rows: Sequence[int] = self._rows(batch.request_ids)
            if at is not None:
                is_sampled = frozenset(at)
                rows = [row if i in is_sampled else -1 for i, row in enumerate(rows)]
            token_ids = pending.output.token_ids
            if token_ids.shape[0] != num_reqs:
                token_ids = token_ids[:num_reqs]  # without padding
            if grammar_output is not None or not self._is_plain(rows):
                logits = pending.output.logits[:num_reqs]
                if grammar_output is not None:
                    logits = apply_grammar(logits, grammar_output, batch.request_ids)
                token_ids, logprobs = step.sampler.sample(
                    logits,
                    rows=rows,
                    idx_mapping=step.buffers.idx_mapping[:num_reqs],
                    positions=step.buffers.seq_lens[:num_reqs],
                    token_ids=step.states.token_ids,
                    record=step.states.token_record,
                )
        return AsyncOutput(
            self._outputs,
            request_ids=request_ids,
            rows=at,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_rows=() if prompt_batch is None else prompt_batch.rows,
            prompt_logprobs=prompt_logprobs,
        )

    def reset(self) -> None:
        """Give up all rows, and a step that was executed but never sampled: an error came between.

        The device may be ahead of the host, whose word counts.
        """
        self._pending = None
        self._forget_rows()
        self.step.states.clear()
        self._prompt_logprobs.clear()

    def close(self) -> None:
        """Free the graphs; harmless when repeated."""
        self._outputs.close()
        self.graphs.close()

    def _add(self, added: AddedRequest) -> None:
        step = self.step
        row = step.states.add(
            added.request_id, added.token_ids, added.block_ids, num_computed_tokens=added.num_computed_tokens
        )
        step.sampler.add_request(
            row,
            added.sampling_params,
            seed=added.seed,
            prompt_len=added.num_prompt_tokens,
            stop_token_ids=added.stop_token_ids,
            bad_words=added.bad_words,
        )
        self._prompt_logprobs.add(added)

    def _batch(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        """That of the last step if these are its requests, one token each again."""
        if not isinstance(scheduled, ScheduledDecodes):
            return build_batch(scheduled)
        if self._last_decodes is None or self._last_decodes.request_ids is not scheduled.request_ids:
            ones = (1,) * len(scheduled)
            self._last_decodes = Batch(
                request_ids=scheduled.request_ids, query_lens=ones, num_decode_reqs=len(scheduled)
            )
        return self._last_decodes

    def _sampled(self, pending: _Pending) -> tuple[Sequence[str], list[int] | None]:
        """Who samples, and their places in the batch; None: all do."""
        if isinstance(pending.scheduled, ScheduledDecodes):
            return pending.batch.request_ids, None
        at = [place for place, item in enumerate(pending.scheduled) if item.is_sampled]
        if len(at) == pending.batch.num_reqs:
            return pending.batch.request_ids, None
        return [pending.batch.request_ids[place] for place in at], at

    def _fill(self, batch: Batch) -> None:
        self.step.buffers.fill(self._rows(batch.request_ids), batch.query_lens)

    def _rows(self, request_ids: tuple[str, ...]) -> tuple[int, ...]:
        """The state rows of a batch's requests; most batches have those of the one before."""
        last = self._last_rows[0]
        if request_ids is not last and request_ids != last:
            row = self.step.states.row
            self._last_rows = request_ids, tuple([row(request_id) for request_id in request_ids])
        return self._last_rows[1]

    def _is_plain(self, rows: Sequence[int]) -> bool:
        """`Sampler.is_plain`, asked once for the rows that `_rows` gives step after step."""
        if rows is self._last_plain_rows:
            return True
        is_plain = self.step.sampler.is_plain(rows)
        if is_plain and rows is self._last_rows[1]:
            self._last_plain_rows = rows
        return is_plain

    def _forget_rows(self) -> None:
        """Requests come and go, and with them what is known of the rows of the last batch."""
        self._last_rows, self._last_plain_rows = ((), ()), None

    def _metadata(self, batch: Batch, dispatched: Dispatched, scheduled: Sequence[ScheduledRequest]) -> StepMetadata:
        step, num_tokens = self.step, dispatched.descriptor.num_tokens
        hosts = None
        if self._needs_host_batch:
            hosts = [
                host_batch(scheduled, step.states, step.block_size, num_tokens, group=group, windows=windows)
                for group, windows in enumerate(step.layout.windows)
            ]
        return step.metadata_builder.build(
            step.buffers.metadata(
                num_tokens=num_tokens,
                num_reqs=batch.num_reqs,
                max_query_len=batch.max_query_len,
                num_decode_reqs=batch.num_decode_reqs,
                hosts=hosts,
            )
        )

    def _run_with_prompt_logits(
        self,
        batch: Batch,
        dispatched: Dispatched,
        scheduled: Sequence[ScheduledRequest],
        prompt_batch: PromptLogprobsBatch,
    ) -> tuple[StepOutput, LogprobsTensors]:
        step = self.step
        self._fill(batch)
        metadata = self._metadata(batch, dispatched, scheduled)
        step.prepare(dispatched.descriptor.num_tokens, batch.num_reqs)
        device = step.buffers.input_ids.device
        logits = step.run_uncaptured(metadata, batch.num_reqs, prompt_batch.logits_indices(device))
        logprobs = prompt_batch.gather(logits[batch.num_reqs :], step.states)
        return step.draw(logits[: batch.num_reqs]), logprobs
