"""`DraftStep`, the passes of a draft model after a step: over the step's prompts, and over requests' newest tokens.

Note [the draft is never behind by more than a token]: the passes that draft k tokens read the newest token and the
first k - 1 drafts, so the keys and values of these are cached. If all drafts are accepted, those of the last draft are
missing, and of nothing else. So the first pass reads two tokens of each request, the newest and the one before it, and
a batch of requests that decode needs no other pass. Prompts, and tokens that are computed again, are read by a pass
over the step's own batch (`fill`).

Nothing that a draft's cache holds changes a token of an answer: it changes only how many drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from piecegraph.runner.attention.interface.backend import AttentionImpl, AttentionMetadataBuilder
from piecegraph.runner.attention.interface.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch
from piecegraph.runner.cudagraphs.capture_sizes import NUM_FIRST_DRAFT_TOKENS
from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.speculative.speculative_step import SpeculativeStep
from piecegraph.runner.step.batch import Batch
from piecegraph.runner.step.model_step import Forward
from piecegraph.runner.step.prepare_inputs import prepare_inputs
from piecegraph.runner.step.state.input_buffers import InputBuffers


class DraftRows(NamedTuple):
    """The requests' rows as the draft reads them."""

    token_ids: torch.Tensor  # [rows, max_model_len] int32, the model's
    num_computed_tokens: torch.Tensor  # [rows + 1] int32, before a pass; the last is of padding
    block_table: torch.Tensor  # [1, rows, max_blocks] int32, that of the draft's group


class DraftBuffers:
    """The tensors at fixed addresses that the passes work in."""

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_blocks: int,
        device: torch.device,
        num_first_tokens: int = NUM_FIRST_DRAFT_TOKENS,
    ) -> None:
        """Allocate the buffers.

        `max_blocks`: kernel blocks of a request. `num_first_tokens`: tokens of a request that the first pass reads.
        """
        self.inputs = InputBuffers(
            max_num_tokens=num_first_tokens * max_num_reqs,
            max_num_reqs=max_num_reqs,
            max_blocks=max_blocks,
            device=device,
        )
        self.num_computed_tokens = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.places = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """A draft model over the rows of the model's step; it writes drafts behind the requests' tokens."""

    forward: Forward
    impl: AttentionImpl
    metadata_builder: AttentionMetadataBuilder
    needs_host_batch: bool
    kv_caches: Mapping[str, KVCache]  # by the layer's name in the draft
    target: SpeculativeStep
    group: int  # of the target's block tables
    buffers: DraftBuffers

    def fixed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors, with names, that captured passes read or write besides the models' own."""
        named = [(f"draft's input {name}", value) for name, value in vars(self.buffers.inputs).items()]
        named += [("draft's num_computed_tokens", self.buffers.num_computed_tokens)]
        named += [("draft's places", self.buffers.places)]
        for name, cache in self.kv_caches.items():
            named += [(f"draft's cache of {name}", tensor) for tensor in cache.tensors]
        return [
            *self.target.fixed_tensors(),
            *((name, value) for name, value in named if isinstance(value, torch.Tensor)),
        ]

    def fill(self, batch: Batch) -> None:
        """Cache keys and values of all tokens of the step that has just run, from its own inputs."""
        inputs, num_tokens = self.target.buffers, batch.num_tokens
        with self._over_step(batch):
            self.forward(inputs.input_ids[:num_tokens], inputs.positions[:num_tokens], inputs.logits_indices[:1])

    def propose(self, draft_rows: torch.Tensor) -> torch.Tensor:
        """Draft for the requests in `draft_rows` `[num_reqs]` int32, -1 for padding, and return them.

        Writes up to `max_drafts` tokens behind each request's newest, as many as `num_proposed` says. The content of a
        graph: nothing depends on anything but the number of requests.
        """
        target = self.target
        is_real, row = draft_rows >= 0, draft_rows.clamp(min=0).long()
        newest = target.states.num_computed_tokens[row]
        num_drafts = target.speculation.num_proposed[row]
        num_slots = target.speculation.num_slots[row]
        for place in range(target.max_drafts):
            is_read = is_real if place == 0 else is_real & (place < num_drafts)
            drawn = self._pass(torch.where(is_read, draft_rows, -1), newest + place, num_slots, is_first=place == 0)
            self._write(drawn, is_real & (place < num_drafts), row, newest + place + 1)
        return draft_rows

    def _pass(self, rows: torch.Tensor, last: torch.Tensor, num_slots: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        """Read the tokens up to the positions `last`, and return the token drafted behind each, `[num_reqs]` int64."""
        inputs, num_reqs = self.buffers.inputs, rows.shape[0]
        width = NUM_FIRST_DRAFT_TOKENS if is_first else 1
        num_tokens = num_reqs * width
        inputs.query_start_loc[: num_reqs + 1] = self.buffers.places[: num_reqs + 1] * width
        self._prepare(rows, last - (width - 1), num_tokens)
        if is_first:  # the newest token may have no slot yet
            slots = inputs.slot_mapping[0, :num_tokens].view(num_reqs, width)
            has_slot = inputs.positions[:num_tokens].view(num_reqs, width) < num_slots.unsqueeze(1)
            slots.copy_(torch.where(has_slot, slots, PAD_SLOT_ID))
        with self._over_pass(num_tokens, num_reqs, width):
            logits = self.forward(
                inputs.input_ids[:num_tokens], inputs.positions[:num_tokens], inputs.logits_indices[:num_reqs]
            )
        return self._drawn(logits, rows, last)

    def _drawn(self, logits: torch.Tensor, rows: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the draft of each row of logits.

        With "probabilistic" it is drawn with the noise of (seed, position) that the model's token of that place is
        drawn with. So the more alike the two distributions are, the more often the tokens are equal.
        """
        if self.target.config.draft_sample_method == "greedy":
            return logits.argmax(-1)
        return gumbel_sample(
            logits,
            idx_mapping=rows,
            temperature=self.target.sampler.temperature,
            seeds=self.target.sampler.seeds,
            positions=last + 1,
        )

    def _prepare(self, rows: torch.Tensor, first: torch.Tensor, num_tokens: int) -> None:
        """Fill the inputs of a pass, which reads the tokens of each request from the position `first` on.

        `query_start_loc` says how many each request has; all together are `num_tokens`.
        """
        target, inputs, num_reqs = self.target, self.buffers.inputs, rows.shape[0]
        inputs.idx_mapping[:num_reqs] = rows
        num_computed = self.buffers.num_computed_tokens
        padding = num_computed.shape[0] - 1
        num_computed[torch.where(rows >= 0, rows, padding).long()] = first
        states = target.states
        prepare_inputs(
            DraftRows(states.token_ids, num_computed, states.block_table[self.group : self.group + 1]),
            inputs,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            block_size=target.block_size,
        )

    def _write(self, drawn: torch.Tensor, is_draft: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> None:
        """Write the tokens `drawn` to `place` in the state rows `row`, where `is_draft`."""
        token_ids = self.target.states.token_ids
        # What is not to be written rewrites the first token of the first row, where no draft can lie.
        to_row, to_place = torch.where(is_draft, row, 0), torch.where(is_draft, place.long(), 0)
        token_ids[to_row, to_place] = torch.where(is_draft, drawn.to(token_ids.dtype), token_ids[0, 0])

    def _over_step(self, batch: Batch) -> set_forward_context:
        """Return the context in which attention reads and writes for all tokens of the step that has just run."""
        metadata = self.target.buffers.metadata(
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            max_query_len=batch.max_query_len,
            num_decode_reqs=batch.num_decode_reqs,
        )
        return self._attending(metadata.groups[self.group])

    def _over_pass(self, num_tokens: int, num_reqs: int, width: int) -> set_forward_context:
        """Return the context of a pass over the prepared inputs, of up to `width` tokens of each request."""
        metadata = self.buffers.inputs.metadata(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=width,
            num_decode_reqs=num_reqs if width == 1 else 0,
        )
        return self._attending(metadata.groups[0])

    def _attending(self, common: AttentionMetadata) -> set_forward_context:
        metadata = self.metadata_builder.build(self._planned(common))
        return set_forward_context(ForwardContext(impl=self.impl, metadata=metadata, kv_caches=self.kv_caches))

    def _planned(self, common: AttentionMetadata) -> AttentionMetadata:
        """Return `common`, with the batch on the host for a backend that plans there.

        The host does not know how many drafts were accepted, so it reads the tensors; on a CPU nothing waits for that.
        """
        if not self.needs_host_batch:
            return common
        host = HostBatch(
            query_start_loc=tuple(common.query_start_loc.tolist()),
            seq_lens=tuple(common.seq_lens.tolist()),
            block_table=common.block_table.long().cpu(),
            slot_mapping=common.slot_mapping.cpu(),
        )
        return replace(common, host=host)
