"""`SpeculativeStep`, a step of the model that verifies drafts and makes those of the next step, in one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.speculative.common.draft_source import DraftModel, DraftSource, PromptLookup
from piecegraph.runner.speculative.common.synthetic_acceptance import (
    conditional_rates,
    rates_of_length,
    synthetic_tokens,
)
from piecegraph.runner.speculative.common.verified_rows import NUM_COUNTS, VerifiedRows
from piecegraph.runner.speculative.verification import lay_out_rows, write_behind
from piecegraph.runner.speculative.verify_drafts import verify_drafts
from piecegraph.runner.step.model_step import ModelStep, StepOutput


class SpeculativeBuffers:
    """The tensors at fixed addresses that a step with drafts needs beside the input buffers."""

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_drafts: int,
        device: torch.device,
        num_slots: torch.Tensor | None = None,
        rates: Sequence[float] | None = None,
    ) -> None:
        """Allocate the tensors, except `num_slots` if it is given.

        `rates`: those by which drafts are accepted (`synthetic_acceptance.conditional_rates`); None: by the model.
        """

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        num_logits = max_num_reqs * (1 + max_drafts)
        self.max_drafts = max_drafts
        self.rows = VerifiedRows(
            first_rows=zeros(max_num_reqs + 1),
            logits_indices=zeros(num_logits),
            idx_mapping=zeros(num_logits, torch.int32),
            positions=zeros(num_logits, torch.int32),
            num_drafts=zeros(max_num_reqs),
        )
        self.num_proposed = zeros(max_num_reqs, torch.int32)
        """How many drafts lie behind each request's tokens, `[rows]` int32 by state row."""
        self.draft_rows = zeros(max_num_reqs, torch.int32)
        """draft_model: the state rows of the requests that the step has sampled for, -1 for others, `[num_reqs]`."""
        self.rates = None if rates is None else torch.tensor(rates, dtype=torch.float32, device=device)
        """synthetic: how probably each draft is accepted where those before it are, `[max_drafts]` float32."""
        self.num_slots = zeros(max_num_reqs, torch.int32) if num_slots is None else num_slots
        """draft_model: how many tokens have a slot in the cache, `[rows]` int32 by state row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep(ModelStep):
    """A `ModelStep` with one row of logits more for each draft of a request.

    See Note [drafts lie behind the tokens]. `StepOutput.token_ids` is the flat form of `[num_reqs, num_columns]` int64
    (`verify`), one copy to the host.
    """

    config: SpeculativeConfig
    speculation: SpeculativeBuffers

    @property
    def max_drafts(self) -> int:
        """The most drafts of a request in a step."""
        return self.speculation.max_drafts

    @property
    def num_columns(self) -> int:
        """The values of a request in a step's result."""
        return 1 + self.max_drafts + NUM_COUNTS

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors, with names, that a captured step reads or writes besides the model's own."""
        named = [(f"drafts' {name}", value) for name, value in self.speculation.rows._asdict().items()]
        for name in ("num_proposed", "draft_rows", "num_slots"):
            named.append((f"drafts' {name}", getattr(self.speculation, name)))
        if self.speculation.rates is not None:
            named.append(("drafts' rates", self.speculation.rates))
        return [*ModelStep.fixed_tensors(self), *named]

    def prepare(self, num_tokens: int, num_reqs: int, *, num_active_loras: int = 0) -> None:
        """Derive the step's inputs from the states of the rows in `idx_mapping`, and its rows of logits."""
        num_reqs = min(num_reqs, self.buffers.max_num_reqs)
        ModelStep.prepare(self, num_tokens, num_reqs, num_active_loras=num_active_loras)
        buffers, states = self.buffers, self.states
        lay_out_rows(
            self.speculation.rows,
            idx_mapping=buffers.idx_mapping,
            query_start_loc=buffers.query_start_loc,
            positions=buffers.positions,
            prefill_lens=states.prefill_lens,
            num_computed_tokens=states.num_computed_tokens,
            num_proposed=self.speculation.num_proposed,
        )
        if num_active_loras:
            assert self.slot_map is not None
            num_logits = min(num_tokens, num_reqs * (1 + self.max_drafts))
            self.slot_map.prepare_logits(self.speculation.rows.logits_indices[:num_logits])

    def _num_logits_of(self, descriptor: BatchDescriptor) -> int:
        """Return the rows of logits that a bucket computes."""
        if descriptor.num_reqs is None:
            return self.num_logits(descriptor.num_tokens)
        return min(descriptor.num_tokens, descriptor.num_reqs * (1 + self.max_drafts))

    def model_inputs(self, num_tokens: int, num_logits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the model's arguments, views of the fixed buffers."""
        indices = self.speculation.rows.logits_indices
        return self.buffers.input_ids[:num_tokens], self.buffers.positions[:num_tokens], indices[:num_logits]

    def num_logits(self, num_tokens: int) -> int:
        """Return the rows of logits that a PIECEWISE bucket of `num_tokens` computes."""
        return min(num_tokens, self.buffers.max_num_reqs * (1 + self.max_drafts))

    def draw(self, logits: torch.Tensor) -> StepOutput:
        """Sample a token for every row of `logits` `[num_logits, vocab_size]`, and decide, record and draft.

        Every step ends with this; only the temperature is applied. The result is final for requests that use no other
        sampling option.
        """
        return self._draw(logits, min(logits.shape[0], self.buffers.max_num_reqs))

    def run_whole(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, input_ids: torch.Tensor
    ) -> StepOutput:
        """Run a whole step, which is the content of a FULL graph; see `ModelStep.run_whole`."""
        num_reqs, num_tokens = idx_mapping.shape[0], input_ids.shape[0]
        self.prepare(num_tokens, num_reqs, num_active_loras=self._num_active_loras())
        num_logits = min(num_tokens, num_reqs * (1 + self.max_drafts))
        return self._draw(self.forward(*self.model_inputs(num_tokens, num_logits)), num_reqs)

    def verify(self, drawn: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Return the result of `verify_drafts` for the tokens `drawn` `[num_logits]` from the rows of logits.

        Idempotent, after `restore_drafts`.
        """
        if self.speculation.rates is not None:
            drawn = synthetic_tokens(
                drawn,
                self.speculation.rows,
                input_ids=self.buffers.input_ids,
                seeds=self.sampler.seeds,
                rates=self.speculation.rates,
                vocab_size=self.sampler.vocab_size,
            )
        return verify_drafts(
            drawn,
            self.speculation.rows,
            buffers=self.buffers,
            states=self.states,
            prefill_lens=self.states.prefill_lens,
            num_proposed=self.speculation.num_proposed,
            num_reqs=num_reqs,
            max_drafts=self.max_drafts,
            source=self._source,
        )

    def restore_drafts(self, num_reqs: int) -> None:
        """Write the drafts of this step behind the requests' tokens again, where a draw has overwritten them."""
        buffers, rows = self.buffers, self.speculation.rows
        idx_mapping = buffers.idx_mapping[:num_reqs]
        source = torch.arange(num_reqs, device=idx_mapping.device) * (idx_mapping >= 0)
        starts = buffers.query_start_loc.long()[source]
        places = torch.arange(self.max_drafts, device=idx_mapping.device)
        at = (starts.unsqueeze(1) + 1 + places).clamp(max=buffers.max_num_tokens - 1)
        num_drafts = (rows.first_rows[1:] - rows.first_rows[:-1])[source] - 1
        write_behind(
            self.states.token_ids,
            idx_mapping[source].long().clamp(min=0),
            buffers.positions[starts.clamp(max=buffers.max_num_tokens - 1)] + 1,
            buffers.input_ids[at],
            num_drafts,
        )

    def _draw(self, logits: torch.Tensor, num_reqs: int) -> StepOutput:
        rows, num_logits = self.speculation.rows, logits.shape[0]
        drawn = gumbel_sample(
            logits,
            idx_mapping=rows.idx_mapping[:num_logits],
            temperature=self.sampler.temperature,
            seeds=self.sampler.seeds,
            positions=rows.positions[:num_logits],
        )
        return StepOutput(logits, self.verify(drawn, num_reqs))

    @property
    def _source(self) -> DraftSource:
        if self.config.method == "ngram":
            return PromptLookup(self.config.prompt_lookup_min, self.config.prompt_lookup_max)
        return DraftModel(self.speculation.num_slots, self.speculation.draft_rows)


def speculative_step(
    step: ModelStep, config: SpeculativeConfig, num_slots: torch.Tensor | None = None
) -> SpeculativeStep:
    """Return `step` with drafts, over the same buffers and new ones of its own.

    `num_slots`: `SpeculativeBuffers.num_slots`, where the host writes it.
    """
    rates: Sequence[float] | None = None
    if config.is_synthetic:
        length, given = config.synthetic_acceptance_length, config.synthetic_acceptance_rates
        count = config.num_speculative_tokens
        rates = conditional_rates(rates_of_length(length, count) if length is not None else given or ())
    return SpeculativeStep(
        **{field.name: getattr(step, field.name) for field in fields(ModelStep)},
        config=config,
        speculation=SpeculativeBuffers(
            max_num_reqs=step.buffers.max_num_reqs,
            max_drafts=config.num_speculative_tokens,
            device=step.buffers.input_ids.device,
            num_slots=num_slots,
            rates=rates,
        ),
    )
