"""`CudaGraphManager`, the owner of the runner's CUDA graphs, their pool and their stream, from capture to close."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.capture import capture
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.graphs import Graphs
from piecegraph.compiler.graphs.warm_up import call_each_kind
from piecegraph.errors import CaptureError
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.attention.interface.forward_context import set_forward_context
from piecegraph.runner.attention.interface.step_metadata import StepMetadata
from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.measured_dispatcher import MeasuredDispatcher
from piecegraph.runner.cudagraphs.measured_times import MEASURED_UP_TO, MeasuredTimes
from piecegraph.runner.cudagraphs.policy import ResolvedMode
from piecegraph.runner.step.model_step import ModelStep, StepOutput
from piecegraph.runner.step.state.input_buffers import dummy_batch
from piecegraph.runner.step.without_grad import without_grad

logger = logging.getLogger(__name__)

NUM_MEASUREMENTS = 3
"""The runs of a step that are timed, after one that is not; the fastest counts."""


class _State(enum.Enum):
    NEW = "new"
    CAPTURING = "capturing"
    READY = "ready"
    CLOSED = "closed"


class CudaGraphManager:
    """The owner of every graph that the dispatcher may choose: captures each of them once, during the start.

    `capture` captures all of them at once; `begin`, `capture_more` and `finish` are for a start that serves meanwhile.

    Both modes share one memory pool and one stream, because only one graph runs at a time.

    Nobody else keeps a `Graphs`: `replay_full` and `replay_piecewise` look it up by mode in every step, so the manager
    may replace it between two steps. The metadata of FULL buckets belongs to the captured graphs and is replaced with
    them; a dispatcher has to be made again from `descriptors` if the captured buckets change.
    """

    def __init__(
        self,
        *,
        step: ModelStep,
        compiled: CompiledModel,
        max_model_len: int,
        needs_host_batch: bool = False,
        kind: str = "auto",
        strict: bool = False,
        check_interval: int | None = None,
    ) -> None:
        self._step = step
        self._compiled = compiled
        self._max_model_len = max_model_len
        self._needs_host_batch = needs_host_batch
        self._options = {"kind": kind, "strict": strict}
        if check_interval is not None:
            self._options["check_interval"] = check_interval
        self._full_metadata: dict[BatchDescriptor, StepMetadata] = {}
        self._graphs: dict[CUDAGraphMode, Graphs] = {}
        self._state = _State.NEW
        self._shared: dict[str, object] = {}  # the pool and the stream of all graphs, on a GPU
        self._spent_bytes = 0  # of the pool
        self._times = MeasuredTimes()
        self.device_bytes = 0
        """The GPU memory that the graphs and their pool take, in bytes."""

    @property
    def ready(self) -> bool:
        """Whether `capture` has finished, after which nothing more may be captured."""
        return self._state is _State.READY

    def capture(
        self,
        *,
        full: Sequence[BatchDescriptor],
        piecewise: Sequence[BatchDescriptor],
        max_bytes: int | None = None,
        measures: bool = False,
        on_phase: OnPhase | None = None,
    ) -> None:
        """Capture the graphs of both modes, PIECEWISE first, within `max_bytes` of graph memory.

        `measures`: measure them, too (see `measure`). Overwrites the input buffers. Raises `CaptureError` if called
        again, and, if strict, for a bucket that cannot be captured; otherwise such a bucket is listed in `failed`.
        """
        self.begin()
        for mode, descriptors in ((CUDAGraphMode.PIECEWISE, piecewise), (CUDAGraphMode.FULL, full)):
            if descriptors:
                self.capture_more(mode, descriptors, max_bytes=max_bytes, on_phase=on_phase)
        with timed_phase(on_phase, "measure graphs") if measures else nullcontext():
            for mode, descriptors in ((CUDAGraphMode.PIECEWISE, piecewise), (CUDAGraphMode.FULL, full)):
                if measures:
                    self.measure(mode, descriptors)
        self.finish()

    def begin(self) -> None:
        """Make the pool and the stream of all graphs. `capture_more` and `finish` follow.

        Raises `CaptureError` if called again.
        """
        if self._state is not _State.NEW:
            raise CaptureError(
                f"the graph manager is {self._state.value}: graphs are captured once, at start. A capture while "
                "serving would stall every request; name all sizes in cudagraph_capture_sizes."
            )
        self._state = _State.CAPTURING
        device = self._device
        if device.type == "cuda" and self._options["kind"] != "recorded":
            self._shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream(device)}

    def capture_more(
        self,
        mode: CUDAGraphMode,
        descriptors: Sequence[BatchDescriptor],
        *,
        max_bytes: int | None = None,
        on_phase: OnPhase | None = None,
    ) -> None:
        """Capture graphs of one mode, as long as all graphs so far take at most `max_bytes`.

        Overwrites the input buffers; no step may be running. Raises `CaptureError` before `begin` and after `finish`,
        and, if strict, for a bucket that cannot be captured.
        """
        if self._state is not _State.CAPTURING:
            raise CaptureError(f"the graph manager is {self._state.value}: graphs are captured during the start only.")
        free_before = self._free_bytes()
        is_full = mode is CUDAGraphMode.FULL
        warm_up = replace(self._step, forward=partial(call_each_kind, self._compiled)).run_whole
        graphs = capture(
            self._step.run_whole if is_full else self._compiled,
            descriptors,
            self._full_inputs if is_full else self._piecewise_inputs,
            mode=mode,
            context=self._full_context if is_full else self._piecewise_context,
            before=None if is_full else self._step.prepare_piecewise,
            after=None if is_full else self._step.draw,
            warm_up=warm_up if is_full else None,
            max_bytes=None if max_bytes is None else max_bytes - self._spent_bytes,
            watched=self._step.fixed_tensors(),
            on_phase=on_phase,
            **self._options,  # type: ignore[arg-type]  # values by name
            **self._shared,  # type: ignore[arg-type]  # values by name
        )
        self._spent_bytes += sum(graphs.ledger().values())
        if mode in self._graphs:
            self._graphs[mode].add(graphs)
        else:
            self._graphs[mode] = graphs
        with timed_phase(on_phase, "settle") if self._device.type == "cuda" else nullcontext():
            self.device_bytes += max(free_before - self._free_bytes(), 0)

    @without_grad
    def measure(self, mode: CUDAGraphMode, descriptors: Sequence[BatchDescriptor]) -> None:
        """Measure the seconds of steps of dummy requests under the graphs of `descriptors`, and without graphs.

        Those that were not captured, have adapters, or hold more than `MEASURED_UP_TO` tokens are left out. Overwrites
        the input buffers; no step may be running. Raises `CaptureError` if no graph is captured any more.
        """
        if self._state is not _State.CAPTURING:
            raise CaptureError(f"the graph manager is {self._state.value}: graphs are measured during the start only.")
        captured = self.descriptors(mode)
        for one in descriptors:
            if one in captured and one.num_tokens <= MEASURED_UP_TO and not one.num_active_loras:
                self._measure(mode, one)

    def _measure(self, mode: CUDAGraphMode, one: BatchDescriptor) -> None:
        metadata = self._dummy_metadata(one.num_tokens)
        graphs, uncaptured = dict(self._times.graphs), dict(self._times.uncaptured)
        if one.num_tokens not in uncaptured:
            uncaptured[one.num_tokens] = self._seconds(lambda: self._run_uncaptured(metadata))
        if mode is CUDAGraphMode.PIECEWISE:
            graphs[mode, one] = self._seconds(lambda: self.replay_piecewise(one, metadata))
        else:
            if one.uniform_token_count is not None and one.num_reqs is not None:
                self._step.buffers.fill([-1] * one.num_reqs, [one.uniform_token_count] * one.num_reqs)
            graphs[mode, one] = self._seconds(lambda: self.replay_full(one))
        self._times = MeasuredTimes(graphs, uncaptured)

    @property
    def times(self) -> MeasuredTimes:
        """What `measure` has measured so far."""
        return self._times

    def _run_uncaptured(self, metadata: StepMetadata) -> None:
        """Run a step of the requests in the buffers without graphs, as a batch that no graph holds."""
        step, num_tokens = self._step, metadata.num_tokens
        num_reqs = step.num_logits(num_tokens)
        step.prepare(num_tokens, num_reqs)
        step.draw(step.run_uncaptured(metadata, num_reqs))

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds that `run` takes at its fastest."""
        is_cuda = self._device.type == "cuda"
        fastest = float("inf")
        for number in range(1 + NUM_MEASUREMENTS):
            if is_cuda:
                torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            run()
            if is_cuda:
                torch.cuda.synchronize(self._device)
            if number:
                fastest = min(fastest, time.perf_counter() - start)
        return fastest

    def finish(self) -> None:
        """End the captures: from now on graphs are only replayed."""
        self._state = _State.READY
        num_graphs = sum(len(graphs.descriptors) for graphs in self._graphs.values())
        logger.info("captured %d graphs, %.2f GiB", num_graphs, self._spent_bytes / 2**30)

    @property
    def _device(self) -> torch.device:
        return self._step.buffers.input_ids.device

    def _free_bytes(self) -> int:
        """Return the free memory of a GPU, without what torch keeps unused; 0 on a CPU."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # unused memory, such as that of warm-ups, must not count as that of graphs
        return int(torch.cuda.mem_get_info(self._device)[0])

    @property
    def graphs(self) -> Mapping[CUDAGraphMode, Graphs]:
        """The captured graphs by mode."""
        return self._graphs

    def descriptors(self, mode: CUDAGraphMode) -> tuple[BatchDescriptor, ...]:
        """Return the buckets that can be replayed under `mode`."""
        graphs = self._graphs.get(mode)
        return graphs.descriptors if graphs is not None else ()

    def failed(self) -> dict[tuple[CUDAGraphMode, BatchDescriptor], str]:
        """Return the reasons for which requested buckets have no graph, by mode and bucket."""
        return {
            (mode, failed.descriptor): failed.reason
            for mode, graphs in self._graphs.items()
            for failed in graphs.failed
        }

    def dispatcher(self, resolved: ResolvedMode, static_sizes: Collection[int]) -> Dispatcher:
        """Return a dispatcher over the captured graphs, by cost if they were measured."""
        captured: dict[str, Any] = {
            "full": self.descriptors(CUDAGraphMode.FULL),
            "piecewise": self.descriptors(CUDAGraphMode.PIECEWISE),
            "resolved": resolved,
            "failed": self.failed(),
            "static_sizes": static_sizes,
        }
        return MeasuredDispatcher(**captured, times=self._times) if self._times.graphs else Dispatcher(**captured)

    def summary(self) -> dict[str, dict[str, float]]:
        """Return, by mode, how many graphs were captured, the seconds they took and the bytes of the pool they hold."""
        return {
            mode.value: {
                "graphs": len(graphs.descriptors),
                "seconds": sum(graphs[descriptor].seconds for descriptor in graphs.descriptors),
                "bytes": sum(graphs.ledger().values()),
            }
            for mode, graphs in self._graphs.items()
        }

    def replay_full(self, descriptor: BatchDescriptor) -> StepOutput:
        """Run a whole step of the rows in `idx_mapping`. The output is valid until the next replay."""
        self._step.metadata_builder.prepare_for_replay(self._full_metadata[descriptor])
        output: StepOutput = self._graphs[CUDAGraphMode.FULL].replay(descriptor)
        return output

    def replay_piecewise(self, descriptor: BatchDescriptor, metadata: StepMetadata) -> StepOutput:
        """Run a whole step of the rows in `idx_mapping`, with attention between the graphs over `metadata`.

        The output has as many rows as the bucket has logits, the batch's requests first, and is valid until the next
        replay.
        """
        with set_forward_context(self._step.context(metadata, "PIECEWISE", descriptor)):
            output: StepOutput = self._graphs[CUDAGraphMode.PIECEWISE].replay(descriptor)
        return output

    def close(self) -> None:
        """Free all graphs. Idempotent; must precede freeing the model and the KV cache."""
        for graphs in self._graphs.values():
            graphs.close()
        self._graphs = {}
        self._full_metadata = {}
        self._state = _State.CLOSED

    def _full_inputs(self, descriptor: BatchDescriptor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert descriptor.num_reqs is not None, descriptor
        buffers = self._step.buffers
        return (
            buffers.idx_mapping[: descriptor.num_reqs],
            buffers.query_start_loc[: descriptor.num_reqs + 1],
            buffers.input_ids[: descriptor.num_tokens],
        )

    def _full_context(self, descriptor: BatchDescriptor, phase: str) -> AbstractContextManager[None]:
        if descriptor not in self._full_metadata:
            self._step.buffers.fill((), ())  # only padding, so that capture writes no keys, values or tokens
            assert descriptor.num_reqs is not None, descriptor
            is_decode = descriptor.uniform_token_count == 1
            common = self._step.buffers.metadata(
                num_tokens=descriptor.num_tokens,
                num_reqs=descriptor.num_reqs,
                max_query_len=descriptor.uniform_token_count or descriptor.num_tokens,
                num_decode_reqs=descriptor.num_reqs if is_decode else 0,
            )
            self._full_metadata[descriptor] = self._step.metadata_builder.init_capture(common)
        return set_forward_context(self._step.context(self._full_metadata[descriptor], "FULL", descriptor))

    def _piecewise_inputs(self, descriptor: BatchDescriptor) -> tuple[torch.Tensor, ...]:
        return self._step.model_inputs(descriptor.num_tokens, self._step.num_logits(descriptor.num_tokens))

    def _dummy_metadata(self, num_tokens: int) -> StepMetadata:
        """Fill the buffers with dummy requests of `num_tokens` tokens, and return their metadata."""
        common = dummy_batch(
            self._step.buffers,
            num_tokens=num_tokens,
            max_model_len=self._max_model_len,
            with_host_batch=self._needs_host_batch,
        )
        return self._step.metadata_builder.build(common)

    def _piecewise_context(self, descriptor: BatchDescriptor, phase: str) -> AbstractContextManager[None]:
        metadata = self._dummy_metadata(descriptor.num_tokens)
        return set_forward_context(self._step.context(metadata, "PIECEWISE", descriptor))
