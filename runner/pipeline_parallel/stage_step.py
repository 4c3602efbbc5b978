"""`StageStep`, one stage's part of a step of the model, over the buffers of the stage."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from piecegraph.runner.pipeline_parallel.stage import StagePlan
from piecegraph.runner.step.model_step import ModelStep, StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep(ModelStep):
    """A `ModelStep` that may begin with the hidden states of the preceding stage, and end with hidden states.

    What a stage that is not the last returns as `StepOutput.logits` are hidden states `[num_tokens, hidden_size]`; its
    `token_ids` are empty.
    """

    plan: StagePlan
    hidden_states: torch.Tensor  # [max_num_tokens, hidden_size], of the preceding stage; of the first stage, no rows
    outgoing: torch.Tensor  # [num_stages, max_num_tokens, hidden_size], for the next stage; of the last stage, no rows

    @property
    def has_logits(self) -> bool:
        """Whether the step ends with logits: that of the last stage does."""
        return self.plan.stage.is_last

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors, with names, that a captured step reads or writes besides the model's own."""
        return [*ModelStep.fixed_tensors(self), ("hidden states of the preceding stage", self.hidden_states)]

    def model_inputs(self, num_tokens: int, num_logits: int) -> tuple[torch.Tensor, ...]:
        """Return the arguments of the stage's module, views of the fixed buffers."""
        buffers, stage = self.buffers, self.plan.stage
        first = buffers.input_ids if stage.is_first else self.hidden_states
        inputs = first[:num_tokens], buffers.positions[:num_tokens]
        return (*inputs, buffers.logits_indices[:num_logits]) if stage.is_last else inputs

    def prepare_piecewise(self, *inputs: torch.Tensor) -> None:
        """Run `prepare` for the sizes of these model inputs, at the start of a PIECEWISE bucket's first graph."""
        num_tokens = inputs[0].shape[0]
        self.prepare(num_tokens, self.num_logits(num_tokens), num_active_loras=self._num_active_loras())

    def draw(self, logits: torch.Tensor) -> StepOutput:
        """Sample and record as `ModelStep.draw` does; a stage that is not the last only counts computed tokens.

        The tokens of the last stage are recorded here when they have come (`record_tokens`).
        """
        if self.plan.stage.is_last:
            return ModelStep.draw(self, logits)
        count_computed(self.states.num_computed_tokens, self.buffers.idx_mapping, self.buffers.seq_lens)
        return StepOutput(logits, self.buffers.logits_indices[:0])


def count_computed(num_computed: torch.Tensor, idx_mapping: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Set the numbers of computed tokens of a batch's rows to `seq_lens`, in place; rows of -1 are padding.

    Numbers never fall, so that rows of padding, which count as 0 for row 0, change nothing. No size depends on values,
    as a captured step needs.
    """
    counts = seq_lens.masked_fill(idx_mapping < 0, 0).to(num_computed.dtype)
    num_computed.scatter_reduce_(0, idx_mapping.clamp(min=0).to(torch.int64), counts, "amax")


def stage_step(step: ModelStep, plan: StagePlan, dtype: torch.dtype) -> StageStep:
    """Return `step` for a stage, over the same buffers and those of hidden states between stages.

    There is a buffer of outgoing hidden states for each batch that may be in flight.
    """
    stage, max_num_tokens = plan.stage, step.buffers.max_num_tokens
    device = step.buffers.input_ids.device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((*shape, plan.hidden_size), dtype=dtype, device=device)

    return StageStep(
        **{field.name: getattr(step, field.name) for field in fields(ModelStep)},
        plan=plan,
        hidden_states=zeros(0 if stage.is_first else max_num_tokens),
        outgoing=zeros(stage.num_stages, 0 if stage.is_last else max_num_tokens),
    )
