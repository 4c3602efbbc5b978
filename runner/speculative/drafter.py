"""`Drafter`, the owner of a draft model's graphs, which drafts after each step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.capture import capture
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.graphs import Graphs
from piecegraph.compiler.graphs.warm_up import call_each_kind
from piecegraph.progress import OnPhase
from piecegraph.runner.device_memory.staged_write import StagedWriteTensor
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.runner.speculative.draft_step import DraftStep
from piecegraph.runner.step.batch import Batch


class Drafter:
    """A draft model, and its passes captured as one graph for each number of requests."""

    def __init__(self, *, step: DraftStep, compiled: CompiledModel, block_size: int, slots: StagedWriteTensor) -> None:
        """Store the parts.

        `block_size`: the tokens of an allocated block. `slots`: the owner of `SpeculativeBuffers.num_slots`.
        """
        self.step = step
        self.compiled = compiled
        self.num_replays = 0
        """How often a graph has drafted since the start."""
        self.num_uncaptured = 0
        """How often the passes ran without a graph."""
        self._block_size = block_size
        self._slots = slots
        self._graphs: Graphs | None = None
        self._sizes: list[int] = []  # the captured numbers of requests, ascending
        self._by_size: dict[int, BatchDescriptor] = {}

    @property
    def descriptors(self) -> tuple[BatchDescriptor, ...]:
        """The captured buckets."""
        return () if self._graphs is None else self._graphs.descriptors

    @property
    def failed(self) -> Mapping[BatchDescriptor, str]:
        """The reasons for which planned buckets have no graph."""
        return {} if self._graphs is None else {one.descriptor: one.reason for one in self._graphs.failed}

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The numbers of requests that graphs draft for, ascending."""
        return tuple(self._sizes)

    def capture(
        self,
        descriptors: Sequence[BatchDescriptor],
        *,
        kind: str,
        strict: bool,
        max_bytes: int | None,
        on_phase: OnPhase | None,
    ) -> None:
        """Capture the passes for each of the `descriptors`, those of the draft's plan, in a pool of their own.

        The pool is not the model's: while the passes run, the step's result is still being copied out of that.
        """
        if not descriptors:
            return
        self.step.target.speculation.draft_rows.fill_(-1)
        self._graphs = capture(
            self.step.propose,
            descriptors,
            lambda descriptor: (self.step.target.speculation.draft_rows[: descriptor.num_reqs],),
            mode=CUDAGraphMode.FULL,
            warm_up=replace(self.step, forward=partial(call_each_kind, self.compiled)).propose,
            kind=kind,
            strict=strict,
            max_bytes=max_bytes,
            watched=self.step.fixed_tensors(),
            on_phase=on_phase,
        )
        self._by_size = {one.num_reqs or 0: one for one in self._graphs.descriptors}
        self._sizes = sorted(self._by_size)

    @property
    def graph_bytes(self) -> int:
        """The bytes of the graphs' pool."""
        return 0 if self._graphs is None else sum(self._graphs.ledger().values())

    def update_slots(self, output: SchedulerOutput) -> None:
        """Bring the numbers of slots that requests have to the device, once their rows are assigned."""
        cells = {}
        row, of_draft = self.step.target.states.row, self.step.group
        for added in output.added:
            cells[0, row(added.request_id)] = len(added.block_ids[of_draft]) * self._block_size
        for request_id, group, start, block_ids in output.new_blocks:
            if group == of_draft:
                cells[0, row(request_id)] = (start + len(block_ids)) * self._block_size
        if cells:
            self._slots.stage_cells(cells)
            self._slots.apply_write()

    def draft(self, batch: Batch, *, is_decode: bool, is_sampled: bool) -> None:
        """Read what the step of `batch` has computed, and draft for the requests that it sampled for.

        `is_decode`: each request computed the tokens it decodes and nothing else. `is_sampled`: any was sampled for.
        """
        if not is_decode:
            self.step.fill(batch)
        if not is_sampled:
            return
        place = bisect_left(self._sizes, batch.num_reqs)
        if self._graphs is not None and place < len(self._sizes):
            self.num_replays += 1
            self._graphs.replay(self._by_size[self._sizes[place]])
        else:
            self.num_uncaptured += 1
            self.step.propose(self.step.target.speculation.draft_rows[: batch.num_reqs])

    def reset(self) -> None:
        """Drop what an interrupted step has staged. Idempotent."""
        self._slots.clear_staged()

    def close(self) -> None:
        """Free the graphs, and then the model. Idempotent."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs, self._sizes, self._by_size = None, [], {}
        self.compiled.close()


def slots_tensor(max_num_reqs: int, device: torch.device) -> StagedWriteTensor:
    """Return the tensor of the numbers of slots by state row, which the host writes."""
    return StagedWriteTensor((1, max_num_reqs), torch.int32, device)
