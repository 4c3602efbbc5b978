"""A check that each captured graph's replay is bitwise equal to its pieces at the same padded shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.cudagraphs.dispatch_counters import DispatchCounters
from piecegraph.runner.cudagraphs.dispatcher import Dispatched
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.inspect.trial_adapter import TRIAL_SLOT
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest
from piecegraph.runner.step.batch import Batch, host_batch

NUM_REQS = 3
"""The number of requests of a batch, where they fit; the rest of a bucket is padding."""

PROMPT_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCheck:
    """The result for one graph."""

    mode: str
    num_tokens: int
    difference: float  # the largest difference of two logits; NaN if one is NaN

    @property
    def ok(self) -> bool:
        """True if all logits are equal."""
        return self.difference == 0.0


@torch.no_grad()
def check_replays(
    engine: Engine, runner: ModelRunner, *, max_model_len: int, needs_host_batch: bool
) -> list[ReplayCheck]:
    """Check every graph and return a row for each. Runs requests of its own in `engine`, which has none."""
    checks: list[ReplayCheck] = []
    length = min(PROMPT_TOKENS, max_model_len - 1)
    modes = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
    buckets = [(mode, descriptor) for mode in modes for descriptor in runner.graphs.descriptors(mode)]
    most = min(NUM_REQS, runner.step.buffers.max_num_reqs)
    for num_reqs in sorted({1, most}):
        mine = [
            (mode, descriptor)
            for mode, descriptor in buckets
            if num_reqs == max(count for count in (1, most) if count <= (descriptor.num_reqs or descriptor.num_tokens))
        ]
        if mine:
            with _decoding(engine, num_reqs, length, max_model_len) as batch:
                replays = _Replays(runner, batch, length, needs_host_batch)
                checks += [replays.check(mode, descriptor) for mode, descriptor in mine]
    runner.counters = DispatchCounters()
    return checks


@contextmanager
def _decoding(engine: Engine, num_reqs: int, length: int, max_model_len: int) -> Iterator[Batch]:
    """Yield a batch of requests whose prompts of `length` tokens are computed; they are aborted at the end."""
    ids = tuple(f"selfcheck-{number}" for number in range(num_reqs))
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0.0, max_tokens=max_model_len - length, ignore_eos=True, detokenize=False)
    try:
        for request_id in ids:
            prompt = torch.randint(engine.vocab_size, (length,), generator=generator).tolist()
            engine.add_request(request_id, prompt, params, is_final_only=True)
        while any(engine.requests[request_id].num_computed_tokens < length for request_id in ids):
            engine.step()
        yield Batch(request_ids=ids, query_lens=(1,) * num_reqs, num_decode_reqs=num_reqs)
    finally:
        for request_id in ids:
            engine.abort(request_id)


class _Replays:
    """One decode step of one batch, the last token of each prompt once more, in any way it can run."""

    def __init__(self, runner: ModelRunner, batch: Batch, length: int, needs_host_batch: bool) -> None:
        self._runner, self._batch, self._needs_host_batch = runner, batch, needs_host_batch
        states = runner.step.states
        self._rows = [states.row(request_id) for request_id in batch.request_ids]
        self._saved = states.token_ids.clone(), states.num_computed_tokens.clone()
        self._num_computed = length - 1
        slot_map = runner.step.slot_map
        if slot_map is not None:  # that of `trial_adapter`, in graphs for batches with adapters
            for row in self._rows:
                slot_map.assign(row, TRIAL_SLOT)
            slot_map.apply_writes()
        self._scheduled = [
            ScheduledRequest(request_id, 1, self._num_computed, False, 0) for request_id in batch.request_ids
        ]

    def check(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> ReplayCheck:
        num_reqs = self._batch.num_reqs
        self._start()
        expected = self._without_graphs(descriptor)[:num_reqs].clone()
        self._start()
        output = self._runner.run(self._batch, Dispatched(mode, descriptor, None), self._scheduled)
        found = output.logits[:num_reqs].clone()
        self._restore()
        is_equal = torch.equal(found, expected)
        difference = 0.0 if is_equal else float((found.double() - expected.double()).abs().max())
        return ReplayCheck(mode=mode.value, num_tokens=descriptor.num_tokens, difference=difference)

    def _start(self) -> None:
        self._restore()
        self._runner.step.states.num_computed_tokens[self._rows] = self._num_computed

    def _restore(self) -> None:
        states = self._runner.step.states
        states.token_ids.copy_(self._saved[0])
        states.num_computed_tokens.copy_(self._saved[1])

    def _without_graphs(self, descriptor: BatchDescriptor) -> torch.Tensor:
        """Compute logits by the same pieces at the same padded shape."""
        step, num_tokens = self._runner.step, descriptor.num_tokens
        step.buffers.fill(self._rows, self._batch.query_lens)
        num_reqs = descriptor.num_reqs or step.num_logits(num_tokens)
        loras = descriptor.num_active_loras
        step.prepare(num_tokens, num_reqs, num_active_loras=loras)
        hosts = None
        if self._needs_host_batch:
            hosts = [
                host_batch(self._scheduled, step.states, step.block_size, num_tokens, group=group, reaches=reaches)
                for group, reaches in enumerate(step.layout.reaches)
            ]
        known_reqs = num_reqs if descriptor.num_reqs else self._batch.num_reqs
        is_decode = descriptor.num_reqs is None or descriptor.uniform_token_count == 1
        common = step.buffers.metadata(
            num_tokens=num_tokens,
            num_reqs=known_reqs,
            max_query_len=1 if is_decode else num_tokens,
            num_decode_reqs=known_reqs if is_decode else 0,
            hosts=hosts,
        )
        return step.run_uncaptured(step.metadata_builder.build(common), num_reqs, num_active_loras=loras)
