"""`SpeculativeRunner`, a `ModelRunner` whose steps verify drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.manager import CudaGraphManager
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.lora.modules import AdaptedModules
from piecegraph.runner.output.async_output import AsyncOutput
from piecegraph.runner.sampling.options.grammar import GrammarOutput, apply_grammar
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.runner.speculative.drafter import Drafter
from piecegraph.runner.speculative.speculative_step import SpeculativeStep
from piecegraph.runner.speculative.verified_output import AsyncVerifiedOutput
from piecegraph.runner.step.batch import Batch, build_batch
from piecegraph.runner.step.without_grad import without_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch(Batch):
    """A batch of which some requests verify drafts."""

    num_drafts: tuple[int, ...]  # of each request

    @property
    def num_rows(self) -> list[int]:
        """The rows of logits of each request."""
        return [1 + drafts for drafts in self.num_drafts]

    @property
    def ids_of_rows(self) -> list[str]:
        """The request of each row of logits."""
        counted = zip(self.request_ids, self.num_rows, strict=True)
        return [request_id for request_id, count in counted for _ in range(count)]

    @property
    def first_rows(self) -> list[int]:
        """The first row of logits of each request, and the number of rows."""
        return list(accumulate(self.num_rows, initial=0))


class SpeculativeRunner(ModelRunner):
    """The owner of the requests' device rows, their drafts included, of the fixed buffers and of the graphs."""

    def __init__(
        self,
        *,
        step: SpeculativeStep,
        graphs: CudaGraphManager,
        dispatcher: Dispatcher,
        needs_host_batch: bool,
        strict: bool,
        adapted: AdaptedModules | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Store the parts; `drafter`: the draft model or the head, for a method that has one.

        `adapted`: as in `ModelRunner`.
        """
        super().__init__(
            step=step,
            graphs=graphs,
            dispatcher=dispatcher,
            needs_host_batch=needs_host_batch,
            strict=strict,
            adapted=adapted,
        )
        self._speculative_step = step
        self.drafter = drafter
        self._drafts_next = True

    def update_states(self, output: SchedulerOutput) -> None:
        """Free, assign and extend state rows as the scheduler has decided."""
        super().update_states(output)
        self._drafts_next = output.drafts_next
        if self.drafter is not None:
            self.drafter.update_slots(output)

    def reset(self) -> None:
        """Release all rows, as `ModelRunner.reset` does."""
        super().reset()
        if self.drafter is not None:
            self.drafter.reset()

    def close(self) -> None:
        """Free the graphs, those of a draft model first, and the draft model. Idempotent."""
        if self.drafter is not None:
            self.drafter.close()
        super().close()

    @without_grad
    def proposed(self, request_ids: Sequence[str]) -> Mapping[str, list[int]]:
        """Return the drafts that lie behind the tokens of requests that have rows, for their next step.

        Waits for the device. Call it before `execute_model`, which replaces them.
        """
        if not request_ids:
            return {}
        step, states = self._speculative_step, self._speculative_step.states
        row = torch.tensor([states.row(request_id) for request_id in request_ids], device=states.token_ids.device)
        places = 1 + torch.arange(step.max_drafts, device=row.device)
        at = (states.num_computed_tokens[row].long().unsqueeze(1) + places).clamp(max=states.token_ids.shape[1] - 1)
        counts, drafts = step.speculation.num_proposed[row], states.token_ids[row.unsqueeze(1), at]
        found = torch.cat([counts.unsqueeze(1), drafts], dim=1).tolist()
        return {request_id: tokens[:count] for request_id, (count, *tokens) in zip(request_ids, found, strict=True)}

    @without_grad
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncOutput:
        """Return the next tokens of each request that samples in this step, still being copied to the host.

        `get` of the result returns a `VerifiedOutput`.
        """
        assert self._pending is not None, "execute_model has not run"
        pending, self._pending = self._pending, None
        step, batch = self._speculative_step, pending.batch
        assert isinstance(batch, DraftBatch), batch
        request_ids, at = self._sampled(pending)
        places: Sequence[int] = range(batch.num_reqs) if at is None else at
        first_rows = batch.first_rows
        decisions = logprobs = None
        if request_ids:
            rows: Sequence[int] = self._rows(batch.request_ids)
            decisions = pending.output.token_ids[: batch.num_reqs * step.num_columns]
            if at is not None:
                is_sampled = frozenset(at)
                rows = [row if place in is_sampled else -1 for place, row in enumerate(rows)]
            if grammar_output is not None or not self._is_plain(rows):
                num_logits = batch.num_logits
                logits = pending.output.logits[:num_logits]
                if grammar_output is not None:
                    logits = apply_grammar(logits, grammar_output, batch.ids_of_rows)
                step.restore_drafts(batch.num_reqs)
                drawn, logprobs, _ = step.sampler.sample(
                    logits,
                    rows=[row for row, drafts in zip(rows, batch.num_drafts, strict=True) for _ in range(1 + drafts)],
                    idx_mapping=step.speculation.rows.idx_mapping[:num_logits],
                    positions=step.speculation.rows.positions[:num_logits],
                    token_ids=step.states.token_ids,
                )
                decisions = step.verify(drawn, batch.num_reqs)
        prompt_batch, prompt_logprobs = pending.prompt_logprobs or (None, None)
        output = AsyncVerifiedOutput(  # before the drafts: the copy does not wait for them
            self._outputs,
            request_ids=request_ids,
            decisions=decisions,
            num_columns=step.num_columns,
            places=places,
            first_rows=[first_rows[place] for place in places],
            logprobs=logprobs,
            prompt_rows=() if prompt_batch is None else prompt_batch.rows,
            prompt_logprobs=prompt_logprobs,
        )
        if self.drafter is not None:
            is_decode = at is None and all(map(int.__eq__, batch.query_lens, batch.num_rows))
            self.drafter.draft(batch, is_decode=is_decode, is_sampled=bool(request_ids) and self._drafts_next)
        return output

    def _batch(self, output: SchedulerOutput) -> DraftBatch:
        batch = build_batch(output.scheduled)
        num_drafts = tuple([output.num_drafts.get(request_id, 0) for request_id in batch.request_ids])
        return DraftBatch(
            request_ids=batch.request_ids,
            query_lens=batch.query_lens,
            num_decode_reqs=batch.num_decode_reqs,
            num_draft_tokens=sum(num_drafts),
            num_active_loras=self._num_active_loras(batch.request_ids),
            num_drafts=num_drafts,
        )
