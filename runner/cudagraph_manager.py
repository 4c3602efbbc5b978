"""The runner's CUDA graphs: one owner of their pool and stream, from capture to close."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.capture import capture
from piecegraph.compiler.graphs.copied_steps import call_with_copies
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.graphs import Graphs
from piecegraph.compiler.graphs.warm_up import call_each_kind
from piecegraph.errors import CaptureError
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.attention.step_metadata import StepMetadata
from piecegraph.runner.dummy_batch import dummy_batch
from piecegraph.runner.forward_context import set_forward_context
from piecegraph.runner.model_step import ModelStep, StepOutput

logger = logging.getLogger(__name__)


class _State(enum.Enum):
    NEW = "new"
    READY = "ready"
    CLOSED = "closed"


class CudaGraphManager:
    """Captures every graph the dispatcher may pick, once; then only replays. One memory pool and one
    stream serve both modes: one graph runs at a time, so all may use the same memory."""

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
        self.device_bytes = 0
        """What all of this took of the GPU's memory: the pool, and the graphs themselves."""

    @property
    def ready(self) -> bool:
        """Everything is captured; from now on nothing may be."""
        return self._state is _State.READY

    def capture(
        self,
        *,
        full: Sequence[BatchDescriptor],
        piecewise: Sequence[BatchDescriptor],
        max_bytes: int | None = None,
        on_phase: OnPhase | None = None,
    ) -> None:
        """Capture both modes, the larger one first, within `max_bytes` of graph memory; then `ready`.

        Overwrites the input buffers. Raises `CaptureError` once ready, and, if strict, for a bucket
        that cannot be captured; otherwise such a bucket is in `failed`.
        """
        if self._state is not _State.NEW:
            raise CaptureError(
                f"the graph manager is {self._state.value}: graphs are captured once, at start. A capture while "
                "serving would stall every request; name all sizes in cudagraph_capture_sizes."
            )
        device = self._step.buffers.input_ids.device
        shared: dict[str, object] = {}
        if device.type == "cuda" and self._options["kind"] != "recorded":
            shared = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream(device)}
        spent = 0
        free_before = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what is unused now would be taken off what graphs take
            free_before = torch.cuda.mem_get_info(device)[0]
        warm_up = replace(self._step, forward=partial(call_each_kind, self._compiled)).run_whole
        record = replace(self._step, forward=partial(call_with_copies, self._compiled)).run_whole
        for mode, descriptors in ((CUDAGraphMode.PIECEWISE, piecewise), (CUDAGraphMode.FULL, full)):
            if not descriptors:
                continue
            is_full = mode is CUDAGraphMode.FULL
            graphs = capture(
                self._step.run_whole if is_full else self._compiled,
                descriptors,
                self._full_inputs if is_full else self._piecewise_inputs,
                mode=mode,
                context=self._full_context if is_full else self._piecewise_context,
                before=None if is_full else self._step.prepare_piecewise,
                after=None if is_full else self._step.draw,
                warm_up=warm_up if is_full else None,
                record=record if is_full else None,
                max_bytes=None if max_bytes is None else max_bytes - spent,
                watched=[*self._step.fixed_tensors(), *(self._compiled.bound_tensors() if is_full else ())],
                on_phase=on_phase,
                **self._options,  # type: ignore[arg-type]  # values by name
                **shared,  # type: ignore[arg-type]  # values by name
            )
            self._graphs[mode] = graphs
            spent += sum(graphs.ledger().values())
        if device.type == "cuda":
            with timed_phase(on_phase, "settle"):
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()  # of what the warm-ups used
            self.device_bytes = max(free_before - torch.cuda.mem_get_info(device)[0], 0)
        self._state = _State.READY
        logger.info(
            "captured %d graphs, %.2f GiB", sum(len(g.descriptors) for g in self._graphs.values()), spent / 2**30
        )
        for reason, count in self.not_copied().items():
            logger.info("of %d graphs every layer ran: %s", count, reason)

    @property
    def graphs(self) -> Mapping[CUDAGraphMode, Graphs]:
        """What was captured, by mode."""
        return self._graphs

    def descriptors(self, mode: CUDAGraphMode) -> tuple[BatchDescriptor, ...]:
        """The buckets that can be replayed under `mode`."""
        graphs = self._graphs.get(mode)
        return graphs.descriptors if graphs is not None else ()

    def failed(self) -> dict[tuple[CUDAGraphMode, BatchDescriptor], str]:
        """Why a bucket that was asked for has no graph."""
        return {
            (mode, failed.descriptor): failed.reason
            for mode, graphs in self._graphs.items()
            for failed in graphs.failed
        }

    def not_copied(self) -> dict[str, int]:
        """Why layers that are alike ran in Python for a graph instead of being copied, and for how many."""
        every = (graphs[descriptor] for graphs in self._graphs.values() for descriptor in graphs.descriptors)
        return dict(Counter(each.reason for graph in every for each in graph.copied if each.reason is not None))

    def summary(self) -> dict[str, dict[str, float]]:
        """Per mode: graphs captured, seconds they took, bytes of the pool they hold, and in how many of them layers are
        copies of others."""
        return {
            mode.value: {
                "graphs": len(graphs.descriptors),
                "seconds": sum(graphs[descriptor].seconds for descriptor in graphs.descriptors),
                "bytes": sum(graphs.ledger().values()),
                "with_copies": sum(any(c.num_blocks for c in graphs[each].copied) for each in graphs.descriptors),
            }
            for mode, graphs in self._graphs.items()
        }

    def replay_full(self, descriptor: BatchDescriptor) -> StepOutput:
        """A whole step of the rows in `idx_mapping`. The output is valid until the next replay."""
        self._step.metadata_builder.prepare_for_replay(self._full_metadata[descriptor])
        output: StepOutput = self._graphs[CUDAGraphMode.FULL].replay(descriptor)
        return output

    def replay_piecewise(self, descriptor: BatchDescriptor, metadata: StepMetadata) -> StepOutput:
        """A whole step of the rows in `idx_mapping`, as many rows of output as the bucket has logits, the
        batch's requests first; attention runs between the graphs over `metadata`. Valid until the next replay."""
        with set_forward_context(self._step.context(metadata, "PIECEWISE", descriptor)):
            output: StepOutput = self._graphs[CUDAGraphMode.PIECEWISE].replay(descriptor)
        return output

    def close(self) -> None:
        """Free all graphs; harmless when repeated. Before the model and the cache go."""
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
            self._step.buffers.fill((), ())  # only padding: nothing is cached or recorded while capturing
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

    def _piecewise_inputs(self, descriptor: BatchDescriptor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._step.model_inputs(descriptor.num_tokens, self._step.num_logits(descriptor.num_tokens))

    def _piecewise_context(self, descriptor: BatchDescriptor, phase: str) -> AbstractContextManager[None]:
        common = dummy_batch(
            self._step.buffers,
            num_tokens=descriptor.num_tokens,
            max_model_len=self._max_model_len,
            with_host_batch=self._needs_host_batch,
        )
        metadata = self._step.metadata_builder.build(common)
        return set_forward_context(self._step.context(metadata, "PIECEWISE", descriptor))
