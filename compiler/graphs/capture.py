"""`piecegraph.capture`, which warms up and records every graph that will be replayed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.building.capturable import CapturableModel
from piecegraph.compiler.building.captured_models import CapturedModel, collecting_models
from piecegraph.compiler.graphs.addresses import NamedAddress, addresses_of
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.graphs import ADDRESS_CHECK_INTERVAL, CapturedGraph, FailedCapture, Graphs
from piecegraph.compiler.graphs.recording.recorder import Recorder, Recording, make_recorder
from piecegraph.compiler.graphs.replay.bound_plan import BoundPlan
from piecegraph.compiler.graphs.replay.prepared_ops import PreparedOp, prepared_ops
from piecegraph.compiler.graphs.replay.replay_plan import ReplayPlan, ReplayStep, record_plan
from piecegraph.compiler.graphs.replay.step_kinds import kinds_of
from piecegraph.compiler.graphs.warm_up import call_each_kind, run_plan
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.errors import CaptureError, OutOfMemory, UsageError
from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.paused_gc import paused_gc
from piecegraph.progress import OnPhase, Phase

logger = logging.getLogger(__name__)

MakeInputs = Callable[[BatchDescriptor], Sequence[Any]]
"""Returns the positional arguments of the step for a descriptor; the tensors are its static inputs."""

Context = Callable[[BatchDescriptor, str], AbstractContextManager[Any]]
"""Takes a descriptor and the phase, "warmup" or "capture"; returns a context for one run of the step."""

BucketContext = Callable[[str], AbstractContextManager[Any]]
"""A `Context` of one descriptor: takes the phase."""

WarmUp = TypeVar("WarmUp")

WARMUPS_OF_FIRST = (True, False)
"""The warm-up runs before the first recording, in order: True runs all steps, False runs one step of each kind.

There are two runs because libraries initialise some things in their first call and others in their second, and no
initialisation may be recorded.
"""

WARMUPS = (False,)
"""The warm-up runs before each further recording. They load and tune the kernels that only this size uses."""


def capture(
    step: Callable[..., Any],
    descriptors: Sequence[BatchDescriptor],
    make_inputs: MakeInputs,
    *,
    mode: CUDAGraphMode | str,
    context: Context | None = None,
    before: Callable[..., object] | None = None,
    after: Callable[[Any], Any] | None = None,
    warm_up: Callable[..., object] | None = None,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    kind: str = "auto",
    strict: bool = False,
    check_interval: int = ADDRESS_CHECK_INTERVAL,
    max_bytes: int | None = None,
    watched: Sequence[tuple[str, torch.Tensor]] = (),
    on_phase: OnPhase | None = None,
) -> Graphs:
    """Capture one graph (FULL), or the graphs of the pieces (PIECEWISE), for each descriptor, largest first.

    `step` is any callable under FULL (it may hold input preparation, logits and sampling), and a `CompiledModel` under
    PIECEWISE. `make_inputs(descriptor)` returns the positional arguments of `step`. Its tensors are the static inputs:
    graphs read them at their addresses, and the caller keeps and fills them. `context(descriptor, phase)` is entered
    around each run, with phase "warmup" or "capture"; metadata that kernels read must be in persistent buffers of the
    caller.

    `before(*static_inputs)` and `after(result) -> result` are for PIECEWISE. `before`, such as input preparation, is
    recorded in the first graph; `after`, such as sampling, is recorded in the last one. `warm_up(*static_inputs)` is
    for FULL. Before the first recording, `step` runs and then `warm_up`; before each further one, `warm_up` runs alone.
    It must launch every kernel of `step`, but not in every layer (`call_each_kind`). The default is `step` itself, or
    `call_each_kind` of a `CompiledModel`.

    `pool` and `stream` default to new ones; `kind` is "cuda", "recorded" (needs no GPU) or "auto". A descriptor whose
    capture fails is left out with a warning and listed in `Graphs.failed`; under `strict`, `CaptureError` or
    `OutOfMemory` is raised instead and everything captured is freed. `max_bytes` bounds the bytes of all graphs: a
    descriptor is left out in the same way if a graph of the size of the previous one would exceed it. `watched` names
    further tensors that the step reads or writes at fixed addresses. Every replay checks addresses and the weights of
    each `CompiledModel` in the step; the first replay of a graph, and one in `check_interval` after it, also checks
    sizes, strides and dtypes.

    Raises `UsageError` for a mode other than FULL and PIECEWISE, a `step` that PIECEWISE cannot cut, `before` or
    `after` under FULL, `warm_up` under PIECEWISE, duplicate descriptors, and a `check_interval` below 1. Raises
    `CaptureError`, also without `strict`, for a `kind`, `pool` or `stream` that the device of the static inputs cannot
    have, and for static inputs on several GPUs.
    """
    options = _Options(
        step=step,
        make_inputs=make_inputs,
        mode=CUDAGraphMode.parse(mode),
        context=context or (lambda descriptor, phase: nullcontext()),
        before=before,
        after=after,
        warm_up=warm_up,
        pool=pool,
        stream=stream,
        kind=kind,
        strict=strict,
        check_interval=check_interval,
        max_bytes=max_bytes,
        watched=watched,
        notify=on_phase or (lambda phase: None),
    )
    options.check(descriptors)
    return _capture_all(options, descriptors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of one call of `capture`, with defaults filled in; `notify` is `on_phase`."""

    step: Callable[..., Any]
    make_inputs: MakeInputs
    mode: CUDAGraphMode
    context: Context
    before: Callable[..., object] | None
    after: Callable[[Any], Any] | None
    warm_up: Callable[..., object] | None
    pool: Any
    stream: torch.cuda.Stream | None
    kind: str
    strict: bool
    check_interval: int
    max_bytes: int | None
    watched: Sequence[tuple[str, torch.Tensor]]
    notify: OnPhase

    def check(self, descriptors: Sequence[BatchDescriptor]) -> None:
        """Raise `UsageError` for arguments that do not fit together."""
        mode = self.mode
        if mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise UsageError(f"capture takes mode FULL or PIECEWISE, not {mode.value}; call it once for each.")
        if mode is CUDAGraphMode.PIECEWISE and not isinstance(self.step, CapturableModel):
            raise UsageError(
                f"PIECEWISE captures the pieces of a CompiledModel, and step is {type(self.step).__name__}. "
                "Compile it with piecegraph.compile, or capture it with mode FULL."
            )
        if mode is CUDAGraphMode.FULL and (self.before is not None or self.after is not None):
            raise UsageError("before and after are for PIECEWISE; under FULL, call them in step itself.")
        if mode is CUDAGraphMode.PIECEWISE and self.warm_up is not None:
            raise UsageError("warm_up is for FULL; a CompiledModel is warmed up step by step.")
        if len(set(descriptors)) != len(descriptors):
            raise UsageError("descriptors has duplicates; one graph is captured per descriptor.")
        if self.check_interval < 1:
            raise UsageError(f"check_interval={self.check_interval}; it is a number of replays, 1 or more.")

    def run_warm_up(self, static_inputs: Sequence[Any], *, is_whole: bool) -> object:
        """Run the FULL step, or with `is_whole=False` what warms it up: each of its kernels, but not in every layer."""
        if is_whole:
            return self.step(*static_inputs)
        if self.warm_up is not None:
            return self.warm_up(*static_inputs)
        if isinstance(self.step, CapturableModel):
            return call_each_kind(self.step, *static_inputs)
        return self.step(*static_inputs)


def _capture_all(options: _Options, descriptors: Sequence[BatchDescriptor]) -> Graphs:
    """Capture all descriptors, keep the kernels that the warm-ups compiled in the cache, and return the graphs."""
    started = time.perf_counter()
    ordered = sorted(descriptors, key=lambda d: (d.num_tokens, d.num_reqs or 0), reverse=True)
    with paused_gc():  # a collection could free a graph, or memory, in the middle of a capture
        captured, failed, recorder = _capture_buckets(options, ordered)
    OWN_KERNELS.save()
    seconds = time.perf_counter() - started
    num_bytes = sum(graph.nbytes for graph in captured.values())
    detail = f"{len(captured)} {options.mode.value} graphs, {num_bytes / 2**20:.0f} MiB"
    options.notify(Phase(name="capture", done=len(ordered), total=len(ordered), seconds=seconds, detail=detail))
    return Graphs(
        captured,
        mode=options.mode,
        kind=recorder.kind if recorder is not None else options.kind,
        pool=getattr(recorder, "pool", None),
        failed=failed,
        check_interval=options.check_interval,
    )


def _capture_buckets(
    options: _Options, ordered: Sequence[BatchDescriptor]
) -> tuple[dict[BatchDescriptor, CapturedGraph], list[FailedCapture], Recorder | None]:
    """Capture one bucket after the other; return the graphs, the failures, and the recorder.

    The recorder is made for the device of the first bucket's static inputs; it is None if no bucket got that far.
    """
    capturer = _BucketCapturer(options=options, prepared_ops=prepared_ops())
    captured: dict[BatchDescriptor, CapturedGraph] = {}
    failed: list[FailedCapture] = []
    recorder: Recorder | None = None
    for number, descriptor in enumerate(ordered):
        detail = f"{options.mode.value} {descriptor.num_tokens}"
        options.notify(Phase(name="capture", done=number, total=len(ordered), detail=detail))
        error: BaseException | None = None
        reason = _over_budget_reason(captured, options.max_bytes)
        if not reason:
            try:
                static_inputs = tuple(options.make_inputs(descriptor))
                if recorder is None:
                    recorder = make_recorder(options.kind, _device_of(static_inputs), options.pool, options.stream)
                captured[descriptor] = capturer.capture(descriptor, static_inputs, recorder, is_first=not captured)
            except (CaptureError, UsageError, CollectiveError):  # it would fail for the other descriptors, too
                _release(captured)
                raise
            except Exception as raised:
                error, reason = raised, f"{type(raised).__name__}: {raised}"
        if reason:
            failed.append(FailedCapture(descriptor, reason))
            if options.strict:
                _release(captured)
                kind_of_error = OutOfMemory if isinstance(error, torch.OutOfMemoryError) else CaptureError
                raise kind_of_error(f"capturing {descriptor} failed: {reason}") from error
            logger.warning("%s runs without graphs: its capture failed: %s", descriptor, reason)
    return captured, failed, recorder


def _over_budget_reason(captured: Mapping[BatchDescriptor, CapturedGraph], max_bytes: int | None) -> str:
    """Return a reason if another graph as large as the last one would exceed `max_bytes`, else ""."""
    if max_bytes is None or not captured:
        return ""
    spent = sum(graph.nbytes for graph in captured.values())
    last = list(captured.values())[-1].nbytes
    if spent + last <= max_bytes:
        return ""
    return f"{spent} bytes of graphs so far and {last} more would pass max_bytes={max_bytes}"


def _release(captured: Mapping[BatchDescriptor, CapturedGraph]) -> None:
    for graph in captured.values():
        graph.release()


@dataclass(frozen=True, kw_only=True)
class _BucketCapturer:
    """The capture of single buckets, with the state that all buckets of one `capture` share."""

    options: _Options
    prepared_ops: Mapping[str, PreparedOp]
    models: dict[int, CapturedModel] = field(default_factory=dict)  # models that ran, by id; filled as buckets run

    @cached_property
    def watched_addresses(self) -> tuple[NamedAddress, ...]:
        """The addresses that the tensors of `watched` had when the first bucket was captured."""
        return addresses_of(self.options.watched)

    @cached_property
    def bound_addresses(self) -> tuple[NamedAddress, ...]:
        """The addresses of the tensors that the models of the step read. Read it after the first bucket has run."""
        return addresses_of([named for model in self.models.values() for named in model.bound_tensors()])

    def capture(
        self, descriptor: BatchDescriptor, static_inputs: tuple[Any, ...], recorder: Recorder, *, is_first: bool
    ) -> CapturedGraph:
        """Warm up and record one bucket. Its `nbytes` is the growth of the pool; its `seconds` include the warm-up."""
        began = time.perf_counter()
        bytes_before = recorder.used_bytes()
        context = partial(self.options.context, descriptor)
        with torch.no_grad(), recorder.on_stream(), collecting_models(self.models):
            if self.options.mode is CUDAGraphMode.FULL:
                plan, result = self._capture_full(static_inputs, context, recorder, is_first)
            else:
                plan, result = self._capture_piecewise(descriptor, static_inputs, context, recorder, is_first)
        named = [(f"input {i} of {descriptor}", t) for i, t in enumerate(static_inputs) if isinstance(t, torch.Tensor)]
        return CapturedGraph(
            descriptor=descriptor,
            plan=plan,
            static_inputs=static_inputs,
            result=result,
            inputs=addresses_of(named),
            watched=self.watched_addresses,
            bound=self.bound_addresses,
            weights=tuple(model.weights for model in self.models.values()),
            nbytes=max(recorder.used_bytes() - bytes_before, 0),
            seconds=time.perf_counter() - began,
        )

    def _capture_full(
        self, static_inputs: tuple[Any, ...], context: BucketContext, recorder: Recorder, is_first: bool
    ) -> tuple[ReplayPlan, Any]:
        _warm_up(lambda is_whole: self.options.run_warm_up(static_inputs, is_whole=is_whole), context, is_first)
        return _record_full(self.options.step, static_inputs, context, recorder)

    def _capture_piecewise(
        self,
        descriptor: BatchDescriptor,
        static_inputs: tuple[Any, ...],
        context: BucketContext,
        recorder: Recorder,
        is_first: bool,
    ) -> tuple[ReplayPlan, Any]:
        options = self.options
        assert isinstance(options.step, CapturableModel), "checked by `_Options.check`"
        before = None if options.before is None else partial(options.before, *static_inputs)
        bound = BoundPlan.of(options.step.parts(static_inputs), self.prepared_ops, before, options.after)
        kinds = kinds_of(self.prepared_ops)
        warmed = _warm_up(lambda is_whole: run_plan(bound, None if is_whole else kinds), context, is_first)
        with context("capture"):
            return record_plan(bound, recorder, str(descriptor), warmed.patchable)


def _warm_up(run: Callable[[bool], WarmUp], context: BucketContext, is_first: bool) -> WarmUp:
    """Do the warm-up runs of a bucket, by `run(is_whole)`, and return the result of the last."""
    for is_whole in WARMUPS_OF_FIRST if is_first else WARMUPS:
        with context("warmup"):
            warmed = run(is_whole)
    return warmed


def _record_full(
    step: Callable[..., Any], static_inputs: tuple[Any, ...], context: BucketContext, recorder: Recorder
) -> tuple[ReplayPlan, Any]:
    """Record the whole step once. The tensors of the returned result do not keep their memory, which the pool owns."""
    trees: list[pytree.TreeSpec] = []

    def run() -> list[Any]:
        with context("capture"):
            leaves, tree = pytree.tree_flatten(step(*static_inputs))
        trees.append(tree)
        return leaves

    recording = recorder.record(run)
    results = [recorder.weak(value) for value in recording.outputs]
    kept = Recording(
        recording.replay, (), recording.release
    )  # without outputs, so that later graphs reuse their memory
    plan = ReplayPlan.of([ReplayStep(recording.replay, "full step", "graph")], [kept], "full step")
    return plan, pytree.tree_unflatten(results, trees[0])


def _device_of(static_inputs: Sequence[Any]) -> torch.device:
    """Return the GPU that the static inputs are on, or the CPU. Raises `CaptureError` if they are on several GPUs."""
    devices = {value.device for value in static_inputs if isinstance(value, torch.Tensor)}
    cuda = {device for device in devices if device.type == "cuda"}
    if len(cuda) > 1:
        raise CaptureError(f"the static inputs are on several devices, {sorted(map(str, cuda))}; a graph runs on one.")
    return next(iter(cuda or devices), torch.device("cpu"))
