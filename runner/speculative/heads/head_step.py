"""`HeadedStep`, a step whose model's hidden states are kept, and `HeadStep`, the passes of a head over them.

Note [a head reads one token ahead]: at position p a head reads the token at p + 1 and a hidden state of position p, and
its keys of p depend on both. So the positions that a step has computed and kept, p < n for n computed tokens, are read
with the model's own hidden states of that step, and no hidden state is ever kept from one step to the next. The first
pass reads the last positions of each request, as many as a verification has rows, and gives the first draft; each pass
after it reads a draft with the head's own hidden state, and its keys are overwritten when the next step has verified
that draft. A block that several texts share holds, for its last position, the keys of the text that computed it, whose
next token may differ: that changes how many drafts are accepted, and no token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from piecegraph.runner.attention.interface.step_metadata import StepMetadata
from piecegraph.runner.speculative.draft_step import DraftStep
from piecegraph.runner.speculative.speculative_step import SpeculativeStep
from piecegraph.runner.step.batch import Batch
from piecegraph.runner.step.model_step import StepOutput
from piecegraph.runner.step.prompt_embeds import EmbedsBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedStep(SpeculativeStep):
    """A step of a model whose hidden states are its second result, and are kept until the next step."""

    hidden_states: torch.Tensor  # [max_num_tokens, size], of the rows of the last step; written

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors, with names, that a captured step reads or writes besides the model's own."""
        return [*SpeculativeStep.fixed_tensors(self), ("hidden states", self.hidden_states)]

    def run_uncaptured(
        self,
        metadata: StepMetadata,
        num_reqs: int,
        more_indices: torch.Tensor | None = None,
        embeds: EmbedsBatch | None = None,
        *,
        num_active_loras: int = 0,
    ) -> torch.Tensor:
        """Return the logits, as `ModelStep.run_uncaptured` does, and keep the hidden states."""
        assert not num_active_loras, "refused with adapters"
        return self._kept(SpeculativeStep.run_uncaptured(self, metadata, num_reqs, more_indices, embeds))

    def draw(self, logits: Any) -> StepOutput:
        """Draw as `SpeculativeStep.draw` does; the results of a PIECEWISE bucket are the logits and hidden states."""
        return SpeculativeStep.draw(self, self._kept(logits) if isinstance(logits, tuple | list) else logits)

    def run_whole(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, input_ids: torch.Tensor
    ) -> StepOutput:
        """Run a whole step, which is the content of a FULL graph; see `ModelStep.run_whole`."""
        num_reqs, num_tokens = idx_mapping.shape[0], input_ids.shape[0]
        self.prepare(num_tokens, num_reqs)
        num_logits = min(num_tokens, num_reqs * (1 + self.max_drafts))
        return self._draw(self._kept(self.forward(*self.model_inputs(num_tokens, num_logits))), num_reqs)

    def _kept(self, results: Any) -> torch.Tensor:
        """Keep the hidden states of a call of the model, and return its logits."""
        logits, states = results
        self.hidden_states[: states.shape[0]] = states
        return logits  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStep(DraftStep):
    """A head over the rows of the model's step; it writes drafts behind the requests' tokens.

    See Note [a head reads one token ahead].
    """

    target: HeadedStep
    head: Any  # the module of the head, of which `joined` runs here, in the same graph
    target_ids: torch.Tensor | None  # [draft_vocab_size] int64: the model's token of each of the head's; None: the same

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors, with names, that captured passes read or write besides the models' own."""
        named = DraftStep.fixed_tensors(self)
        return named if self.target_ids is None else [*named, ("head's tokens", self.target_ids)]

    def fill(self, batch: Batch) -> None:
        """Cache keys and values of all tokens of the step that has just run, from its own inputs."""
        target, inputs, num_tokens = self.target, self.target.buffers, batch.num_tokens
        positions = inputs.positions[:num_tokens]
        request = torch.searchsorted(
            inputs.query_start_loc[1 : batch.num_reqs + 1].contiguous(),
            torch.arange(num_tokens, dtype=torch.int32, device=positions.device),
            right=True,
        ).clamp(max=batch.num_reqs - 1)
        row = inputs.idx_mapping[request].long().clamp(min=0)
        forward: Any = self.forward
        with self._over_step(batch):
            forward(
                self._next_tokens(row, positions),
                positions,
                self.head.joined(target.hidden_states[:num_tokens]),
                inputs.logits_indices[:1],
            )

    def propose(self, draft_rows: torch.Tensor) -> torch.Tensor:
        """Draft for the requests in `draft_rows` `[num_reqs]` int32, -1 for padding, and return them.

        Writes up to `max_drafts` tokens behind each request's newest, as many as `num_proposed` says. The content of a
        graph: nothing depends on anything but the number of requests.
        """
        target = self.target
        is_real, row = draft_rows >= 0, draft_rows.clamp(min=0).long()
        newest = target.states.num_computed_tokens[row]
        num_drafts = target.speculation.num_proposed[row]
        logits, hidden = self._first_pass(draft_rows, row, newest)
        for place in range(target.max_drafts):
            is_draft = is_real & (place < num_drafts)
            if place:
                rows = torch.where(is_draft, draft_rows, -1)
                logits, hidden = self._next_pass(rows, row, newest + place - 1, hidden)
            drawn = self._drawn(logits, draft_rows, newest + place)
            self._write(drawn, is_draft, row, newest + place + 1)
        return draft_rows

    def _first_pass(
        self, draft_rows: torch.Tensor, row: torch.Tensor, newest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the last positions that the step has computed and kept; return the last one's logits and hidden state.

        These are at most 1 + `max_drafts` of each request, one behind another; rows after all of them are padding.
        """
        target, inputs, num_reqs = self.target, self.buffers.inputs, draft_rows.shape[0]
        width = 1 + target.max_drafts
        num_tokens, last_row = num_reqs * width, target.buffers.max_num_tokens - 1
        of_step = target.buffers.query_start_loc[:num_reqs].clamp(max=last_row)
        begin = target.buffers.positions[of_step].int()
        first = torch.maximum(begin, newest - width)
        starts = inputs.query_start_loc
        starts[:1].zero_()  # an assignment of 0 would copy it from the host, which no capture may
        torch.cumsum((newest - first) * (draft_rows >= 0), 0, dtype=torch.int32, out=starts[1 : num_reqs + 1])
        self._prepare(draft_rows, first, num_tokens)
        positions = inputs.positions[:num_tokens]
        places = torch.arange(num_tokens, dtype=torch.int32, device=positions.device)
        request = torch.searchsorted(starts[1 : num_reqs + 1].contiguous(), places, right=True).clamp(max=num_reqs - 1)
        at = (of_step[request] + positions - begin[request]).clamp(min=0, max=last_row)
        return self._run(
            self._next_tokens(row[request], positions),
            self.head.joined(target.hidden_states[at]),
            num_reqs,
            width,
        )

    def _next_pass(
        self, rows: torch.Tensor, row: torch.Tensor, position: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the newest draft at `position` with the head's own `hidden` state."""
        num_reqs = rows.shape[0]
        self.buffers.inputs.query_start_loc[: num_reqs + 1] = self.buffers.places[: num_reqs + 1]
        self._prepare(rows, position, num_reqs)
        return self._run(self._next_tokens(row, self.buffers.inputs.positions[:num_reqs]), hidden, num_reqs, 1)

    def _run(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, num_reqs: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the prepared inputs, of up to `width` tokens of each request."""
        inputs, num_tokens = self.buffers.inputs, token_ids.shape[0]
        forward: Any = self.forward
        with self._over_pass(num_tokens, num_reqs, width):
            logits, hidden = forward(token_ids, inputs.positions[:num_tokens], hidden, inputs.logits_indices[:num_reqs])
        return logits, hidden

    def _next_tokens(self, row: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the tokens behind `positions` of the state rows `row`, int64."""
        token_ids = self.target.states.token_ids
        return token_ids[row, (positions + 1).clamp(max=token_ids.shape[1] - 1)].long()

    def _drawn(self, logits: torch.Tensor, rows: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the draft of each row of logits, a token of the model; `last`: the position before the draft's."""
        ids = self.target_ids
        if ids is None:
            return DraftStep._drawn(self, logits, rows, last)
        if self.target.config.draft_sample_method == "greedy":
            return ids[DraftStep._drawn(self, logits, rows, last)]
        of_model = logits.new_full((logits.shape[0], self.target.sampler.vocab_size), -torch.inf)
        of_model[:, ids] = logits  # noise is drawn for each token of the model
        return DraftStep._drawn(self, of_model, rows, last)


def headed_step(step: SpeculativeStep, size: int, dtype: torch.dtype) -> HeadedStep:
    """Return `step` with room for hidden states of `size` numbers a token."""
    buffers = step.buffers
    states = torch.zeros(buffers.max_num_tokens, size, dtype=dtype, device=buffers.input_ids.device)
    return HeadedStep(
        **{field.name: getattr(step, field.name) for field in fields(SpeculativeStep)}, hidden_states=states
    )
