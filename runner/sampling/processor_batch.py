"""The caller's logits processors in the sampler: the batch that they see, and their places among the options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from piecegraph.runner.common.logits_processor import (
    PROCESSOR_ERRORS,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    checked_logits,
)
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows


@dataclass(slots=True, kw_only=True, eq=False)
class ProcessedRequest:
    """A request as processors see it."""

    row: int  # of the states
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # the list that processors keep: it grows in place
    num_tokens: int = -1  # prompt and output, as counted here: a processor may wrongly change the lists
    has_drawn: bool = False  # in an earlier step, so that the device knows one more token

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_intact(self) -> bool:
        """Return whether no processor has changed the length of a list of tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) == self.num_tokens


def next_order(
    order: Sequence[ProcessedRequest], sampled: Sequence[ProcessedRequest]
) -> tuple[list[ProcessedRequest], BatchUpdate | None]:
    """Return the requests of this step in contiguous rows, and the changes since `order`, or None if there are none.

    As few requests as possible change their row: new requests take the rows of those that left, then the last requests
    move to rows that are still empty.
    """
    is_sampled = set(map(id, sampled))
    was_there = set(map(id, order))
    rows: list[ProcessedRequest | None] = [one if id(one) in is_sampled else None for one in order]
    empty = [row for row, one in enumerate(rows) if one is None]
    added = []
    new = [one for one in sampled if id(one) not in was_there]
    for at, one in enumerate(new):
        row = empty[at] if at < len(empty) else len(rows)
        if row == len(rows):
            rows.append(one)
        else:
            rows[row] = one
        added.append((row, one.params, one.prompt_token_ids, one.output_token_ids))
    removed, moved = empty[len(new) :], list[MovedRequest]()
    for row in removed:
        while rows and rows[-1] is None:
            rows.pop()
        if row < len(rows):
            moved.append((len(rows) - 1, row, MoveDirectionality.UNIDIRECTIONAL))
            rows[row] = rows.pop()
    while rows and rows[-1] is None:
        rows.pop()
    made = [one for one in rows if one is not None]
    assert len(made) == len(rows) == len(sampled), "a row is empty, or a request has none"
    has_changed = bool(removed or added or moved)
    return made, BatchUpdate(len(made), removed, added, moved) if has_changed else None


@dataclass(slots=True, kw_only=True, eq=False)
class ProcessorBatch:
    """The batch of all processors, whose rows differ from those of a step: a step's requests come in any order.

    Note [errors of processors]: a processor that raises ends the requests it serves and no step. An error is kept in
    `failures` by the state row of each such request, whose token of this step is then dropped. After an error in
    `update_state`, or an interrupt, the rows that processors know are uncertain; the next update removes all rows and
    adds all requests again.
    """

    processors: Sequence[LogitsProcessor]
    requests: dict[int, ProcessedRequest] = field(default_factory=dict)  # by state row
    order: list[ProcessedRequest] = field(default_factory=list)
    last: SamplingBatch | None = None
    places: torch.Tensor | None = None  # [batch_size] int64, row of the step's logits for each of `order`
    failures: dict[int, BaseException] = field(default_factory=dict)  # of this step, by state row
    num_uncertain_rows: int = 0  # rows that some processor may know although `order` does not have them
    _failed: list[LogitsProcessor] = field(default_factory=list)  # those whose `update_state` raised in this step

    def enter(self, batch: SamplingBatch) -> torch.Tensor:
        """Update all processors for a step, once; returns `places`. Waits for the tokens of the step before."""
        if self.last is batch and self.places is not None:
            return self.places
        place_of = {row: place for place, row in enumerate(batch.rows) if row in self.requests}
        sampled = [self.requests[row] for row in place_of]
        self.failures, self._failed = {}, []
        self._add_tokens(sampled, batch)
        self._update_processors(sampled)
        for one in sampled:
            one.has_drawn = True
        places = [place_of[one.row] for one in self.order]
        self.last, self.places = batch, to_device(places, torch.int64, batch.idx_mapping.device)
        return self.places

    def apply(self, processors: Sequence[LogitsProcessor], logits: torch.Tensor) -> torch.Tensor:
        """Return `logits` `[batch_size, vocab_size]`, mutated or not, after `processors`.

        The rows of failed requests are undefined; see Note [errors of processors].
        """
        for processor in processors:
            if any(processor is failed for failed in self._failed):
                continue
            try:
                logits = checked_logits(processor.apply(logits), logits)
                failures: Mapping[int, BaseException] = processor.take_failures()
            except PROCESSOR_ERRORS as error:
                failures = dict.fromkeys(_served_rows(processor, len(self.order)), error)
            for row, one_error in failures.items():
                if row < len(self.order):
                    self.failures.setdefault(self.order[row].row, one_error)
        return logits

    def _update_processors(self, sampled: Sequence[ProcessedRequest]) -> None:
        before = self.num_uncertain_rows
        known, self.order = ([], []) if before else (self.order, self.order)
        order, update = next_order(known, sampled)
        if before:
            removed = range(before)
            update = BatchUpdate(len(order), removed, () if update is None else update.added, ())
        self.num_uncertain_rows = max(before, len(known), len(order))  # until every processor has followed
        self.order = order
        for processor in self.processors:
            try:
                processor.update_state(update)
            except PROCESSOR_ERRORS as error:
                self._failed.append(processor)
                for one in order:
                    self.failures.setdefault(one.row, error)
        if not self._failed:
            self.num_uncertain_rows = 0

    def _add_tokens(self, sampled: Sequence[ProcessedRequest], batch: SamplingBatch) -> None:
        """Add the tokens that were drawn in the step before."""
        for one in sampled:
            if not one.is_intact:
                error = ValueError("a logits processor changed the length of a list of token ids; change a copy.")
                self.failures[one.row] = error
        grown = [one for one in sampled if one.has_drawn and one.row not in self.failures]
        if not grown:
            return
        device = batch.token_ids.device
        rows = to_device([one.row for one in grown], torch.int64, device)
        at = to_device([one.num_tokens for one in grown], torch.int64, device)
        for one, token in zip(grown, batch.token_ids[rows, at].tolist(), strict=True):
            one.output_token_ids.append(token)
            one.num_tokens += 1


def _served_rows(processor: LogitsProcessor, batch_size: int) -> Collection[int]:
    """Return the rows that end with an error of `processor`'s."""
    try:
        served = processor.served_rows()
        return range(batch_size) if served is None else [row for row in served if row < batch_size]
    except PROCESSOR_ERRORS:
        return range(batch_size)


class ProcessorOption(SamplerOption):
    """The processors that can change the likeliest token, or those that cannot; all requests use the option."""

    def __init__(self, batch: ProcessorBatch, *, is_argmax_invariant: bool, max_num_reqs: int, device: torch.device):
        super().__init__(StagedRows(max_num_reqs, device))
        self._batch = batch
        self._is_argmax_invariant = is_argmax_invariant
        self._processors = [one for one in batch.processors if one.is_argmax_invariant() == is_argmax_invariant]

    @property
    def processors(self) -> Sequence[LogitsProcessor]:
        """The processors that this option applies."""
        return self._processors

    @property
    def failures(self) -> Mapping[int, BaseException]:
        """The errors of processors in the last step, by state row."""
        return self._batch.failures

    def words(self, request: OptionRequest) -> Sequence[int] | None:
        return []

    def stage(self, row: int, request: OptionRequest) -> None:
        self.remove(row)
        self._users.add(row)
        tokens = list(request.token_ids)
        self._batch.requests[row] = ProcessedRequest(
            row=row,
            params=request.params,
            prompt_token_ids=tokens[: request.prompt_len],
            output_token_ids=tokens[request.prompt_len :],
        )

    def remove(self, row: int) -> None:
        self._users.discard(row)
        self._batch.requests.pop(row, None)

    def apply(self, logits: torch.Tensor, selected: torch.Tensor, batch: SamplingBatch) -> None:
        places = self._batch.enter(batch)
        if not self._processors:
            return
        before = logits[places]
        if not self._is_argmax_invariant:
            logits[places] = self._batch.apply(self._processors, before).to(logits.dtype)
            return
        temperature = batch.temperature[batch.idx_mapping[places].long()].unsqueeze(1)
        is_random = temperature > 0
        temperature = torch.where(is_random, temperature, 1.0)
        scaled = before / temperature
        after = self._batch.apply(self._processors, scaled.clone())
        is_changed = (after != scaled) & is_random  # the other logits stay bitwise the same
        logits[places] = torch.where(is_changed, after.to(logits.dtype) * temperature, before)


def processor_options(
    processors: Sequence[LogitsProcessor], *, max_num_reqs: int, device: torch.device
) -> tuple[ProcessorOption, ProcessorOption]:
    """Return the option before the penalties and the one after them, over one batch.

    Both are always made, because the one that is applied first updates all processors for the step.
    """
    batch = ProcessorBatch(processors=tuple(processors))
    before, after = (
        ProcessorOption(batch, is_argmax_invariant=is_invariant, max_num_reqs=max_num_reqs, device=device)
        for is_invariant in (False, True)
    )
    return before, after
