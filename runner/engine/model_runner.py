"""`ModelRunner`, which runs the model on a step's requests and then samples, in two phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.attention.interface.forward_context import clear_forward_context
from piecegraph.runner.attention.interface.step_metadata import StepMetadata
from piecegraph.runner.cudagraphs.dispatch_counters import DispatchCounters, refuse_downgrade
from piecegraph.runner.cudagraphs.dispatcher import Agree, Dispatched, Dispatcher, uniform_token_count
from piecegraph.runner.cudagraphs.manager import CudaGraphManager
from piecegraph.runner.lora.adapter import LoadedAdapter
from piecegraph.runner.lora.modules import AdaptedModules
from piecegraph.runner.lora.slot_map import NO_ADAPTER
from piecegraph.runner.output.async_output import AsyncOutput, OutputStream
from piecegraph.runner.sampling.logprobs import LogprobsTensors
from piecegraph.runner.sampling.options.grammar import GrammarOutput, apply_grammar
from piecegraph.runner.scheduling.lora_slots import LoraAssignment
from piecegraph.runner.scheduling.scheduler_output import (
    AddedRequest,
    ScheduledDecodes,
    ScheduledRequest,
    SchedulerOutput,
)
from piecegraph.runner.step.batch import Batch, build_batch, host_batch
from piecegraph.runner.step.model_step import ModelStep, StepOutput
from piecegraph.runner.step.prompt_embeds import EmbedsBatch, PromptEmbedsStates
from piecegraph.runner.step.prompt_logprobs import PromptLogprobsBatch, PromptLogprobsStates
from piecegraph.runner.step.without_grad import without_grad

PROMPT_EMBEDS_RUN_UNCAPTURED = "prompt_embeds: every graph begins with token ids"
PROMPT_LOGPROBS_RUN_UNCAPTURED = "prompt_logprobs: no graph computes logits for every row of a prompt"


@dataclass(frozen=True, slots=True)
class _Pending:
    """The results of `execute_model` that `sample_tokens` needs."""

    output: StepOutput
    batch: Batch
    scheduled: Sequence[ScheduledRequest]
    prompt_logprobs: tuple[PromptLogprobsBatch, LogprobsTensors] | None


class ModelRunner:
    """The owner of the requests' device rows, of the fixed buffers (in `step`) and of the graphs over them.

    Neither phase waits for the device; only `AsyncOutput.get` does.
    """

    agree: Agree | None = None
    """The agreement by which engines that step together decide on each batch; None: this engine steps alone."""

    calibrate: Callable[[], None] | None = None
    """Calibrates the scales of cached keys and values again, for other weights; None: they are not calibrated."""

    def __init__(
        self,
        *,
        step: ModelStep,
        graphs: CudaGraphManager,
        dispatcher: Dispatcher,
        needs_host_batch: bool,
        strict: bool,
        adapted: AdaptedModules | None = None,
    ) -> None:
        """`adapted`: the modules that adapters are written to; None: adapters are not enabled."""
        self.step = step
        self.graphs = graphs
        self.dispatcher = dispatcher
        self.counters = DispatchCounters()
        self._needs_host_batch = needs_host_batch
        self._strict = strict
        self._prompt_logprobs = PromptLogprobsStates()
        self._prompt_embeds = PromptEmbedsStates()
        self._adapted = adapted
        self._with_adapter: set[str] = set()  # requests that have rows and an adapter
        self._outputs = OutputStream(step.buffers.input_ids.device)
        self._pending: _Pending | None = None
        self._last_rows: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
        self._last_plain_rows: Sequence[int] | None = None  # rows that need no sampler; their options cannot change
        self._last_decodes: Batch | None = None
        self._last_dispatched: tuple[Batch, CUDAGraphMode, int, bool, Dispatched] | None = None

    @property
    def adapted(self) -> AdaptedModules | None:
        """The modules that adapters are written to; None: adapters are not enabled."""
        return self._adapted

    @without_grad
    def execute_model(self, output: SchedulerOutput, *, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Compute the scheduled tokens: fill the KV cache and keep the step's output for `sample_tokens`.

        `at_most` forbids modes above it (FULL > PIECEWISE > NONE); every mode computes the same tokens.
        """
        assert self._pending is None, "sample_tokens has not run since the last execute_model"
        self.update_states(output)
        batch = self._batch(output)
        prompt_batch = self._prompt_logprobs.batch(output.scheduled)
        embeds = self._prompt_embeds.batch(output.scheduled)
        if embeds is not None:
            self._pending = self._run_with_embeds(batch, output.scheduled, embeds, prompt_batch)
            return
        if prompt_batch is None:
            dispatched = self.dispatch(batch, at_most)
            self._pending = _Pending(self.run(batch, dispatched, output.scheduled), batch, output.scheduled, None)
            return
        dispatched = self.dispatch(batch, CUDAGraphMode.NONE, needed=PROMPT_LOGPROBS_RUN_UNCAPTURED)
        step_output, logprobs = self._run_with_prompt_logits(batch, dispatched, output.scheduled, prompt_batch)
        self._pending = _Pending(step_output, batch, output.scheduled, (prompt_batch, logprobs))

    def use_dispatcher(self, dispatcher: Dispatcher, *, strict: bool) -> None:
        """Look batches up in `dispatcher` from the next step on, which sees buffers that a capture has overwritten."""
        self.dispatcher, self._strict = dispatcher, strict
        self._last_dispatched = None

    def update_states(self, output: SchedulerOutput) -> None:
        """Free, assign and extend state rows as the scheduler has decided."""
        step = self.step
        if output.removed or output.added:
            self._forget_rows()
        for request_id in output.removed:
            row = step.states.remove(request_id)
            self._prompt_logprobs.remove(request_id)
            self._prompt_embeds.remove(request_id)
            self._with_adapter.discard(request_id)
            if row is not None:
                step.sampler.remove_request(row)
        for added in output.added:
            self._add(added)
        if output.new_blocks:
            step.states.append_blocks(output.new_blocks)
        step.states.apply_writes()
        step.sampler.apply_staged_writes()
        if step.slot_map is not None:
            step.slot_map.apply_writes()

    def dispatch(
        self, batch: Batch, at_most: CUDAGraphMode = CUDAGraphMode.FULL, *, needed: str | None = None
    ) -> Dispatched:
        """Return the mode and descriptor that a batch runs under, and count them.

        Raises if the mode is a downgrade and the runner is strict, unless a request of the batch requires it: `needed`
        is then the reason, which is counted.
        """
        last = self._last_dispatched
        if last is not None and last[0] is batch and last[1] is at_most:
            _, _, num_tokens, is_decode, dispatched = last
        else:
            num_tokens, is_decode = batch.num_tokens, batch.num_decode_reqs == batch.num_reqs
            dispatched = self.dispatcher.dispatch(
                num_tokens=num_tokens,
                num_reqs=batch.num_reqs,
                uniform_token_count=uniform_token_count(batch.query_lens),
                num_active_loras=batch.num_active_loras,
                agree=self.agree,
                at_most=at_most,
            )
            if self.agree is None:
                self._last_dispatched = batch, at_most, num_tokens, is_decode, dispatched
        if needed is None:
            refuse_downgrade(dispatched, self._strict)
        elif dispatched.reason is not None:
            dispatched = dispatched._replace(reason=needed)
        self.counters.record(dispatched, num_tokens, is_decode=is_decode)
        return dispatched

    def run(self, batch: Batch, dispatched: Dispatched, scheduled: Sequence[ScheduledRequest] = ()) -> StepOutput:
        """Run a batch of requests that have rows, and record the sampled tokens in their states.

        Does not wait for the device; a batch equal to the preceding one copies nothing to the device. `scheduled` is
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
        loras = batch.num_active_loras
        step.prepare(descriptor.num_tokens, batch.num_reqs, num_active_loras=loras)
        return step.draw(step.run_uncaptured(metadata, batch.num_logits, num_active_loras=loras))

    @without_grad
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncOutput:
        """Return the next token of each request that samples in this step, still being copied to the host.

        `grammar_output`: the tokens that grammars allow for some requests of this step, all of which must be scheduled
        in this step; the log probabilities of these requests are computed after masking, too.
        """
        assert self._pending is not None, "execute_model has not run"
        pending, self._pending = self._pending, None
        step, batch = self.step, pending.batch
        num_reqs = batch.num_reqs
        request_ids, at = self._sampled(pending)
        prompt_batch, prompt_logprobs = pending.prompt_logprobs or (None, None)
        token_ids: torch.Tensor | None = None
        logprobs: LogprobsTensors | None = None
        errors: Mapping[str, BaseException] | None = None
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
                token_ids, logprobs, failures = step.sampler.sample(
                    logits,
                    rows=rows,
                    idx_mapping=step.buffers.idx_mapping[:num_reqs],
                    positions=step.buffers.seq_lens[:num_reqs],
                    token_ids=step.states.token_ids,
                    record=step.states.token_record,
                )
                if failures:
                    errors = {
                        request_id: failures[row]
                        for request_id, row in zip(batch.request_ids, rows, strict=True)
                        if row in failures
                    }
        return AsyncOutput(
            self._outputs,
            request_ids=request_ids,
            rows=at,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_rows=() if prompt_batch is None else prompt_batch.rows,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )

    def reset(self) -> None:
        """Release all rows, and drop a step that was executed but not sampled because of an error.

        Host state is authoritative; the device may be ahead of it. Waits for all launched work, which may read host
        memory that would otherwise be reused at once. Idempotent.
        """
        device = self.step.buffers.input_ids.device
        if device.type == "cuda":
            with suppress(RuntimeError):  # a device that has failed; the next launch reports it
                torch.cuda.synchronize(device)
        clear_forward_context()
        self._pending = None
        self._forget_rows()
        self._last_decodes = self._last_dispatched = None
        self.step.states.clear()
        self._prompt_logprobs.clear()
        self._prompt_embeds.clear()
        self._with_adapter.clear()
        if self.step.slot_map is not None:
            self.step.slot_map.clear_staged()

    def close(self) -> None:
        """Free the graphs. Idempotent."""
        try:
            self._outputs.close()
        finally:
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
            token_ids=added.token_ids,
        )
        self._prompt_logprobs.add(added)
        self._prompt_embeds.add(added)
        if step.slot_map is not None:
            step.slot_map.assign(row, NO_ADAPTER if added.lora is None else added.lora.slot)
        if added.lora is not None:
            self._add_adapter(added.request_id, added.lora)

    def _add_adapter(self, request_id: str, assigned: LoraAssignment) -> None:
        """Note that a request has an adapter, and write that to its slot if it does not lie there."""
        self._with_adapter.add(request_id)
        adapter = assigned.to_write
        if adapter is not None:
            assert self._adapted is not None and isinstance(adapter, LoadedAdapter), "adapters are not enabled"
            self._adapted.write(assigned.slot, adapter.matrices)

    def _num_active_loras(self, request_ids: Iterable[str]) -> int:
        """Return the number of slots if one of the requests has an adapter, else 0.

        What adapters' kernels are launched with depends on nothing else.
        """
        if not self._with_adapter or self._with_adapter.isdisjoint(request_ids):
            return 0
        assert self._adapted is not None
        return self._adapted.options.num_slots

    def _batch(self, output: SchedulerOutput) -> Batch:
        """Return the batch of a step; the last decode step's batch again if its requests are the same."""
        scheduled = output.scheduled
        if not isinstance(scheduled, ScheduledDecodes):
            loras = self._num_active_loras([item.request_id for item in scheduled]) if self._with_adapter else 0
            return build_batch(scheduled, num_active_loras=loras)
        if self._last_decodes is None or self._last_decodes.request_ids is not scheduled.request_ids:
            ones = (1,) * len(scheduled)
            self._last_decodes = Batch(
                request_ids=scheduled.request_ids,
                query_lens=ones,
                num_decode_reqs=len(scheduled),
                num_active_loras=self._num_active_loras(scheduled.request_ids),
            )
        return self._last_decodes

    def _sampled(self, pending: _Pending) -> tuple[Sequence[str], list[int] | None]:
        """Return the ids of the requests that sample and their places in the batch; None: all requests sample."""
        if isinstance(pending.scheduled, ScheduledDecodes):
            return pending.batch.request_ids, None
        at = [place for place, item in enumerate(pending.scheduled) if item.is_sampled]
        if len(at) == pending.batch.num_reqs:
            return pending.batch.request_ids, None
        return [pending.batch.request_ids[place] for place in at], at

    def _fill(self, batch: Batch) -> None:
        self.step.buffers.fill(self._rows(batch.request_ids), batch.query_lens)

    def _rows(self, request_ids: tuple[str, ...]) -> tuple[int, ...]:
        """Return the state rows of a batch's requests; most batches have the same rows as the preceding one."""
        last = self._last_rows[0]
        if request_ids is not last and request_ids != last:
            row = self.step.states.row
            self._last_rows = request_ids, tuple([row(request_id) for request_id in request_ids])
        return self._last_rows[1]

    def _is_plain(self, rows: Sequence[int]) -> bool:
        """Return `Sampler.is_plain(rows)`, cached while `_rows` returns the same rows."""
        if rows is self._last_plain_rows:
            return True
        is_plain = self.step.sampler.is_plain(rows)
        if is_plain and rows is self._last_rows[1]:
            self._last_plain_rows = rows
        return is_plain

    def _forget_rows(self) -> None:
        """Drop the cached rows of the last batch, because requests were added or removed."""
        self._last_rows, self._last_plain_rows = ((), ()), None

    def _metadata(self, batch: Batch, dispatched: Dispatched, scheduled: Sequence[ScheduledRequest]) -> StepMetadata:
        step, num_tokens = self.step, dispatched.descriptor.num_tokens
        hosts = None
        if self._needs_host_batch:
            hosts = [
                host_batch(scheduled, step.states, step.block_size, num_tokens, group=group, reaches=reaches)
                for group, reaches in enumerate(step.layout.reaches)
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

    def _run_with_embeds(
        self,
        batch: Batch,
        scheduled: Sequence[ScheduledRequest],
        embeds: EmbedsBatch,
        prompt_batch: PromptLogprobsBatch | None,
    ) -> _Pending:
        """Run a step in which some rows are given as embeddings.

        The step runs without graphs even if the runner is strict, because such prompts were enabled on purpose.
        """
        dispatched = self.dispatch(batch, CUDAGraphMode.NONE, needed=PROMPT_EMBEDS_RUN_UNCAPTURED)
        if prompt_batch is not None:
            step_output, logprobs = self._run_with_prompt_logits(batch, dispatched, scheduled, prompt_batch, embeds)
            return _Pending(step_output, batch, scheduled, (prompt_batch, logprobs))
        step = self.step
        self._fill(batch)
        metadata = self._metadata(batch, dispatched, scheduled)
        loras = batch.num_active_loras
        step.prepare(dispatched.descriptor.num_tokens, batch.num_reqs, num_active_loras=loras)
        logits = step.run_uncaptured(metadata, batch.num_logits, embeds=embeds, num_active_loras=loras)
        return _Pending(step.draw(logits), batch, scheduled, None)

    def _run_with_prompt_logits(
        self,
        batch: Batch,
        dispatched: Dispatched,
        scheduled: Sequence[ScheduledRequest],
        prompt_batch: PromptLogprobsBatch,
        embeds: EmbedsBatch | None = None,
    ) -> tuple[StepOutput, LogprobsTensors]:
        step = self.step
        self._fill(batch)
        metadata = self._metadata(batch, dispatched, scheduled)
        loras = batch.num_active_loras
        step.prepare(dispatched.descriptor.num_tokens, batch.num_reqs, num_active_loras=loras)
        indices = prompt_batch.logits_indices(step.buffers.input_ids.device)
        logits = step.run_uncaptured(metadata, batch.num_logits, indices, embeds, num_active_loras=loras)
        logprobs = prompt_batch.gather(logits[batch.num_logits :], step.states)
        return step.draw(logits[: batch.num_logits]), logprobs
