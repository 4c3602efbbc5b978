"""Captured graphs: replay by descriptor, never capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.graphs.addresses import NamedAddress, check_addresses
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.known_blocks import Copied
from piecegraph.compiler.graphs.replay_plan import ReplayPlan
from piecegraph.compiler.graphs.static_inputs import fill_static_inputs
from piecegraph.errors import CaptureError, GraphNotCaptured, InputMismatch

ADDRESS_CHECK_INTERVAL = 1024
"""Replays of one graph between two address checks, unless `capture` was told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """One bucket: its steps, its static inputs (the caller's) and how its result is put together."""

    descriptor: BatchDescriptor
    plan: ReplayPlan
    static_inputs: tuple[Any, ...]
    result: Any  # what a replay returns: views of the graph's memory
    addresses: tuple[NamedAddress, ...]
    nbytes: int  # by which the pool grew for it
    seconds: float
    copied: tuple[Copied, ...] = ()  # of each recording in which layers repeat

    def release(self) -> None:
        """Free its recordings; harmless when repeated."""
        for recording in self.plan.recordings:
            recording.release()


@dataclass(frozen=True, slots=True)
class FailedCapture:
    """A bucket that could not be captured and runs without graphs."""

    descriptor: BatchDescriptor
    reason: str


class Graphs:
    """What `piecegraph.capture` returns: owns the graphs and their share of the pool until `close`."""

    def __init__(
        self,
        captured: Mapping[BatchDescriptor, CapturedGraph],
        *,
        mode: CUDAGraphMode,
        kind: str,
        pool: Any,
        failed: Sequence[FailedCapture],
        check_interval: int,
    ) -> None:
        self.mode = mode
        self.kind = kind
        self.pool = pool
        self.failed = tuple(failed)
        self._captured = {descriptor: _Replayed(graph) for descriptor, graph in captured.items()}
        self._check_interval = check_interval
        self._closed = False

    def __contains__(self, descriptor: BatchDescriptor) -> bool:
        return descriptor in self._captured

    @property
    def descriptors(self) -> tuple[BatchDescriptor, ...]:
        """What was captured, in order of capture."""
        return tuple(self._captured)

    def __getitem__(self, descriptor: BatchDescriptor) -> CapturedGraph:
        """The captured bucket. Raises `GraphNotCaptured`."""
        return self._find(descriptor).graph

    def costs(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """What a replay of it is made of, e.g. `{"graph": 29, "launch": 28}`; see `ReplayStep.cost`."""
        return self._find(descriptor).graph.plan.costs()

    def notes(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """Why split ops of it cost more than a launch, and how many do."""
        return self._find(descriptor).graph.plan.notes()

    def replay(self, descriptor: BatchDescriptor, *args: Any, out: Any = None) -> Any:
        """Run the graph of `descriptor` and return its outputs: views, valid until the next replay in
        this pool. Never captures.

        Without `args` it runs over the static inputs as they are. With `args` each is checked for
        shape, dtype and device, and copied into its static input unless it is in place already.
        `out`, nested as the result, receives a copy and is returned instead.

        Raises `GraphNotCaptured` (listing what was captured), `InputMismatch`, and `CaptureError` if
        a captured tensor moved or the graphs are closed.
        """
        replayed = self._captured.get(descriptor) or self._find(descriptor)
        graph = replayed.graph
        if args:
            fill_static_inputs(descriptor, graph.static_inputs, args)
        if replayed.until_check == 0:
            check_addresses(graph.addresses)
            replayed.until_check = self._check_interval
        replayed.until_check -= 1
        if torch.is_grad_enabled():
            with torch.no_grad():
                graph.plan.run()
        else:  # entering no_grad costs as much as 20 steps
            graph.plan.run()
        return graph.result if out is None else _copied_to(graph.result, out)

    def ledger(self) -> dict[BatchDescriptor, int]:
        """Bytes by which the pool grew for each graph."""
        return {descriptor: replayed.graph.nbytes for descriptor, replayed in self._captured.items()}

    def close(self) -> None:
        """Free every graph and let go of the pool; harmless when repeated. Call it before process
        groups go away. Note [graphs before process groups]: a graph that holds collectives must not
        outlive their communicator."""
        for replayed in self._captured.values():
            replayed.graph.release()
        self._captured = {}
        self._closed = True
        self.pool = None

    def __enter__(self) -> Graphs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find(self, descriptor: BatchDescriptor) -> _Replayed:
        if self._closed:
            raise CaptureError("these graphs are closed; capture again.")
        replayed = self._captured.get(descriptor)
        if replayed is None:
            sizes = sorted({known.num_tokens for known in self._captured})
            reason = next((failed.reason for failed in self.failed if failed.descriptor == descriptor), None)
            raise GraphNotCaptured(
                f"no {self.mode.value} graph for {descriptor}"
                + (f": its capture failed ({reason})" if reason else "")
                + f"; captured num_tokens are {sizes}. Pad the batch to one of them, capture this descriptor too, "
                "or run it without graphs."
            )
        return replayed


class _Replayed:
    """A captured graph, and when its addresses are checked next."""

    __slots__ = ("graph", "until_check")

    def __init__(self, graph: CapturedGraph) -> None:
        self.graph = graph
        self.until_check = 0


def _copied_to(result: Any, out: Any) -> Any:
    sources, tree = pytree.tree_flatten(result)
    targets, out_tree = pytree.tree_flatten(out)
    if tree != out_tree:
        raise InputMismatch(f"out= is nested as {out_tree}; the result is {tree}.")
    for source, target in zip(sources, targets, strict=True):
        if isinstance(source, torch.Tensor):
            if target.shape != source.shape or target.dtype != source.dtype:
                raise InputMismatch(
                    f"out= has a tensor of shape {tuple(target.shape)} and {target.dtype}; "
                    f"the result's is {tuple(source.shape)} and {source.dtype}."
                )
            target.copy_(source)
    return out
