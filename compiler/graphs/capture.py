"""`piecegraph.capture`: warm up and record every graph that will be replayed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.addresses import NamedAddress, addresses_of
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.bound_plan import Bound
from piecegraph.compiler.graphs.copied_steps import call_with_copies
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.graph_editor import CopyFailed
from piecegraph.compiler.graphs.graphs import ADDRESS_CHECK_INTERVAL, CapturedGraph, FailedCapture, Graphs
from piecegraph.compiler.graphs.known_blocks import KnownBlocks
from piecegraph.compiler.graphs.prepared_ops import PreparedOp, prepared_ops
from piecegraph.compiler.graphs.recorder import Recorder, Recording, make_recorder
from piecegraph.compiler.graphs.replay_plan import ReplayPlan, ReplayStep, record_plan
from piecegraph.compiler.graphs.step_kinds import kinds_of
from piecegraph.compiler.graphs.warm_up import call_each_kind, run_plan
from piecegraph.compiler.stored.own_kernels import OWN_KERNELS
from piecegraph.errors import CaptureError, OutOfMemory, UsageError
from piecegraph.paused_gc import paused_gc
from piecegraph.progress import OnPhase, Phase

logger = logging.getLogger(__name__)

MakeInputs = Callable[[BatchDescriptor], Sequence[Any]]
Context = Callable[[BatchDescriptor, str], AbstractContextManager[Any]]
Inside = Callable[[str], AbstractContextManager[Any]]
"""The same, of one bucket: takes the phase."""

Warmed = TypeVar("Warmed")

WARMUPS_OF_FIRST = (True, False)
"""Runs of the very ops before the first recording, of all steps or of each kind of step only: libraries that start up
at a first call, and what follows of it at the second, must not be recorded."""

WARMUPS = (False,)
"""The same before each further one: kernels that this size is the first to take are loaded, and measured, then."""


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
    record: Callable[..., Any] | None = None,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    kind: str = "auto",
    strict: bool = False,
    check_interval: int = ADDRESS_CHECK_INTERVAL,
    max_bytes: int | None = None,
    watched: Sequence[tuple[str, torch.Tensor]] = (),
    copy_layers: bool = True,
    on_phase: OnPhase | None = None,
) -> Graphs:
    """Capture one graph (FULL) or one chain of graphs (PIECEWISE) per descriptor, largest first.

    `step`: for FULL any callable (it may hold input preparation, logits and sampling); for PIECEWISE
    a `CompiledModel`. `make_inputs(descriptor)` gives its positional arguments: these tensors are the
    static inputs and stay the caller's. `context(descriptor, phase)`, phase "warmup" or "capture", is
    entered around each run; metadata that kernels read must be persistent buffers of the caller. A split
    op with a prepare (`register_prepare`) is launched at replay; `Graphs.costs` tells what each costs.
    `before(*static_inputs)` and `after(result) -> result` are for PIECEWISE, where `step` is the model
    alone: input preparation, and sampling or whatever else is made of the result, become part of the
    first and the last graph. A FULL `step` holds them itself.
    `warm_up(*static_inputs)` is for FULL: run after `step` ahead of the first graph, and instead of it ahead of each
    other, it must launch each kernel that `step` does, and need not do so in every layer: a `step` that calls a
    `CompiledModel` may be given with `warm_up.call_each_kind` in its place. Default: `step`; for a `CompiledModel`, and
    under PIECEWISE, that.
    `record(*static_inputs)` is for FULL too: recorded instead of `step`, it must launch what `step` does and return the
    same. A `step` that calls a `CompiledModel` may be given with `copied_steps.call_with_copies` in its place: of
    layers that are alike a few then run, and their nodes in the graph are copied for the others, where that is shown
    to give the same (`CapturedGraph.copied`). Default: `step`; for a `CompiledModel`, that. PIECEWISE does so where a
    bucket is one graph.
    `pool` and `stream` default to new ones; `kind` is "cuda", "recorded" (no GPU needed) or "auto".

    A descriptor whose capture raises becomes NONE with one warning, listed in `Graphs.failed`;
    `strict` raises `CaptureError` instead, with everything captured so far freed. With `max_bytes`,
    capture stops before the pool outgrows it, by the bytes of the graph before (they descend).
    `watched`: named tensors, besides the static inputs and a `CompiledModel`'s own, that the step reads or
    writes at fixed addresses; the address checks include them.
    `copy_layers=False` has every layer recorded by running it.
    Resets torch's peak memory statistics: the first warm-up's peak is what a new pool begins with.
    `check_interval`: address checks on the first replay of a graph and every so many after.

    Raises `UsageError` for a mode a single batch cannot run under, a `step` PIECEWISE cannot cut,
    `before` or `after` under FULL, `warm_up` or `record` under PIECEWISE, or duplicate descriptors.
    """
    mode = CUDAGraphMode.parse(mode)
    if mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        raise UsageError(f"capture takes mode FULL or PIECEWISE, not {mode.value}; call it once for each.")
    if mode is CUDAGraphMode.PIECEWISE and not isinstance(step, CompiledModel):
        raise UsageError(
            f"PIECEWISE captures the pieces of a CompiledModel, and step is {type(step).__name__}. "
            "Compile it with piecegraph.compile, or capture it with mode FULL."
        )
    if mode is CUDAGraphMode.FULL and (before is not None or after is not None):
        raise UsageError("before and after are for PIECEWISE; under FULL, call them in step itself.")
    if mode is CUDAGraphMode.PIECEWISE and (warm_up is not None or record is not None):
        raise UsageError("warm_up and record are for FULL; a CompiledModel is warmed up and recorded step by step.")
    if warm_up is None:
        warm_up = partial(call_each_kind, step) if isinstance(step, CompiledModel) else step
    if record is None:
        record = partial(call_with_copies, step) if isinstance(step, CompiledModel) else step
    if len(set(descriptors)) != len(descriptors):
        raise UsageError("descriptors has duplicates; one graph is captured per descriptor.")
    if check_interval < 1:
        raise UsageError(f"check_interval={check_interval}; it is a number of replays, 1 or more.")
    notify = on_phase or (lambda phase: None)
    job = _Job(
        step=step,
        mode=mode,
        context=context or (lambda descriptor, phase: nullcontext()),
        before=before,
        after=after,
        warm_up=warm_up,
        record=record,
        watched=watched,
        prepared_ops=prepared_ops(),
        known=KnownBlocks(may_copy=copy_layers),
    )
    ordered = sorted(descriptors, key=lambda d: (d.num_tokens, d.num_reqs or 0), reverse=True)
    captured: dict[BatchDescriptor, CapturedGraph] = {}
    failed: list[FailedCapture] = []
    recorder: Recorder | None = None
    started = time.perf_counter()
    spent = 0
    with paused_gc():  # a collection could free a graph, or memory, in the middle of another
        for number, descriptor in enumerate(ordered):
            notify(
                Phase(name="capture", done=number, total=len(ordered), detail=f"{mode.value} {descriptor.num_tokens}")
            )
            reason: str | None = None
            error: BaseException | None = None
            last = next(reversed(captured.values()), None)
            if max_bytes is not None and last is not None and spent + last.nbytes > max_bytes:
                reason = f"{spent} bytes of graphs so far and {last.nbytes} more would pass max_bytes={max_bytes}"
            else:
                try:
                    static_inputs = tuple(make_inputs(descriptor))
                    if recorder is None:
                        recorder = make_recorder(kind, _device_of(static_inputs), pool, stream)
                    graph = job.capture(descriptor, static_inputs, recorder, is_first=not captured)
                    captured[descriptor] = graph
                    spent += graph.nbytes
                except (CaptureError, UsageError):
                    _release(captured)
                    raise
                except Exception as raised:
                    error, reason = raised, f"{type(raised).__name__}: {raised}"
            if reason is not None:
                failed.append(FailedCapture(descriptor, reason))
                if strict:
                    _release(captured)
                    kind_of_error = OutOfMemory if isinstance(error, torch.OutOfMemoryError) else CaptureError
                    raise kind_of_error(f"capturing {descriptor} failed: {reason}") from error
                logger.warning("%s runs without graphs: its capture failed: %s", descriptor, reason)
    OWN_KERNELS.keep()  # those that the warm-ups were first to launch
    seconds = time.perf_counter() - started
    num_copied = sum(any(each.num_blocks for each in graph.copied) for graph in captured.values())
    detail = f"{len(captured)} {mode.value} graphs, {spent / 2**20:.0f} MiB, layers copied in {num_copied}"
    notify(Phase(name="capture", done=len(ordered), total=len(ordered), seconds=seconds, detail=detail))
    return Graphs(
        captured,
        mode=mode,
        kind=recorder.kind if recorder is not None else kind,
        pool=getattr(recorder, "pool", None),
        failed=failed,
        check_interval=check_interval,
    )


def _release(captured: Mapping[BatchDescriptor, CapturedGraph]) -> None:
    for graph in captured.values():
        graph.release()


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all buckets of one capture share."""

    step: Callable[..., Any]
    mode: CUDAGraphMode
    context: Context
    before: Callable[..., object] | None
    after: Callable[[Any], Any] | None
    warm_up: Callable[..., object]
    record: Callable[..., Any]
    watched: Sequence[tuple[str, torch.Tensor]]
    prepared_ops: Mapping[str, PreparedOp]
    known: KnownBlocks

    @cached_property
    def shared_addresses(self) -> tuple[NamedAddress, ...]:
        """Of all that every bucket reads or writes; where it was when the first one was captured."""
        bound = self.step.bound_tensors() if isinstance(self.step, CompiledModel) else []
        return addresses_of([*self.watched, *bound])

    def capture(
        self, descriptor: BatchDescriptor, static_inputs: tuple[Any, ...], recorder: Recorder, *, is_first: bool
    ) -> CapturedGraph:
        """Warm up and record one bucket."""
        began = time.perf_counter()
        bytes_before = recorder.used_bytes()
        inside = partial(self.context, descriptor)
        with torch.no_grad(), recorder.on_stream(), self.known.used():
            try:
                plan, result = self._captured(descriptor, static_inputs, inside, recorder, is_first)
            except CopyFailed as error:
                logger.warning("all layers run in every recording from now on: %s", error)
                self.known.may_copy = False
                plan, result = self._captured(descriptor, static_inputs, inside, recorder, is_first)
        named = [(f"input {i} of {descriptor}", t) for i, t in enumerate(static_inputs) if isinstance(t, torch.Tensor)]
        return CapturedGraph(
            descriptor=descriptor,
            plan=plan,
            static_inputs=static_inputs,
            result=result,
            addresses=addresses_of(named) + self.shared_addresses,
            nbytes=max(recorder.used_bytes() - bytes_before, 0),
            seconds=time.perf_counter() - began,
            copied=tuple(self.known.told),
        )

    def _captured(
        self,
        descriptor: BatchDescriptor,
        static_inputs: tuple[Any, ...],
        inside: Inside,
        recorder: Recorder,
        is_first: bool,
    ) -> tuple[ReplayPlan, Any]:
        if self.mode is CUDAGraphMode.FULL:
            return self._capture_full(static_inputs, inside, recorder, is_first)
        return self._capture_piecewise(descriptor, static_inputs, inside, recorder, is_first)

    def _capture_full(
        self, static_inputs: tuple[Any, ...], inside: Inside, recorder: Recorder, is_first: bool
    ) -> tuple[ReplayPlan, Any]:
        _warm_up(lambda is_whole: (self.step if is_whole else self.warm_up)(*static_inputs), inside, recorder, is_first)
        return _record_full(self.record, static_inputs, inside, recorder)

    def _capture_piecewise(
        self,
        descriptor: BatchDescriptor,
        static_inputs: tuple[Any, ...],
        inside: Inside,
        recorder: Recorder,
        is_first: bool,
    ) -> tuple[ReplayPlan, Any]:
        assert isinstance(self.step, CompiledModel), "checked by capture"
        before = None if self.before is None else partial(self.before, *static_inputs)
        bound = Bound.of(self.step.parts(static_inputs), self.prepared_ops, before, self.after)
        kinds = kinds_of(self.prepared_ops)
        warmed = _warm_up(lambda is_whole: run_plan(bound, None if is_whole else kinds), inside, recorder, is_first)
        with inside("capture"):
            return record_plan(bound, recorder, str(descriptor), warmed.patchable)


def _warm_up(run: Callable[[bool], Warmed], inside: Inside, recorder: Recorder, is_first: bool) -> Warmed:
    """What the last run gives. `run` takes whether every step is to run."""
    for is_whole in WARMUPS_OF_FIRST if is_first else WARMUPS:
        with recorder.sized() if is_whole else nullcontext(), inside("warmup"):
            warmed = run(is_whole)
    return warmed


def _record_full(
    record: Callable[..., Any], static_inputs: tuple[Any, ...], inside: Inside, recorder: Recorder
) -> tuple[ReplayPlan, Any]:
    """One recording of the whole step; its result's tensors become views without ownership."""
    trees: list[pytree.TreeSpec] = []

    def run() -> list[Any]:
        with inside("capture"):
            leaves, tree = pytree.tree_flatten(record(*static_inputs))
        trees.append(tree)
        return leaves

    recording = recorder.record(run)
    results = [recorder.weak(value) for value in recording.outputs]
    kept = Recording(recording.replay, (), recording.release)
    plan = ReplayPlan.of([ReplayStep(recording.replay, "full step", "graph")], [kept], "full step")
    return plan, pytree.tree_unflatten(results, trees[0])


def _device_of(static_inputs: Sequence[Any]) -> torch.device:
    devices = {value.device for value in static_inputs if isinstance(value, torch.Tensor)}
    cuda = {device for device in devices if device.type == "cuda"}
    if len(cuda) > 1:
        raise CaptureError(f"the static inputs are on several devices, {sorted(map(str, cuda))}; a graph runs on one.")
    return next(iter(cuda or devices), torch.device("cpu"))
