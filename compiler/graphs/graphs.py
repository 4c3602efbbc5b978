"""Captured graphs, which are replayed by descriptor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.building.bound_weights import BoundWeights
from piecegraph.compiler.graphs.addresses import Addresses, NamedAddress, check_addresses
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.replay.replay_plan import ReplayPlan
from piecegraph.compiler.graphs.static_inputs import fill_static_inputs
from piecegraph.errors import CaptureError, GraphNotCaptured, InputMismatch

ADDRESS_CHECK_INTERVAL = 1024
"""The default number of replays of one graph between two complete checks of all addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """A captured bucket: its replay plan, its static inputs (the caller's) and its result."""

    descriptor: BatchDescriptor
    plan: ReplayPlan
    static_inputs: tuple[Any, ...]
    result: Any  # the result of a replay: views of the graph's memory
    inputs: tuple[NamedAddress, ...]  # the static inputs
    watched: tuple[NamedAddress, ...]  # the caller's tensors that all buckets read or write
    bound: tuple[NamedAddress, ...]  # tensors that pieces of its models read
    weights: tuple[BoundWeights, ...]  # of its models
    nbytes: int  # growth of the pool
    seconds: float

    @property
    def addresses(self) -> tuple[NamedAddress, ...]:
        """The captured addresses of everything that the graph reads or writes."""
        return (*self.inputs, *self.watched, *self.bound)

    def release(self) -> None:
        """Free the recordings. Idempotent."""
        for recording in self.plan.recordings:
            recording.release()


@dataclass(frozen=True, slots=True)
class FailedCapture:
    """A bucket that could not be captured and runs without graphs."""

    descriptor: BatchDescriptor
    reason: str


class Graphs:
    """The result of `piecegraph.capture`, which owns the graphs and their share of the pool until `close`."""

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
        self._weights = tuple({id(each): each for graph in captured.values() for each in graph.weights}.values())
        for each in self._weights:
            each.pin()
        places = {id(place): place for graph in captured.values() for place in graph.watched}
        self._watched = Addresses(tuple(places.values()))
        self._check_interval = check_interval
        self._runs_beside = kind == "cuda"  # the host continues while a replay runs
        self._closed = False

    def __contains__(self, descriptor: BatchDescriptor) -> bool:
        return descriptor in self._captured

    @property
    def descriptors(self) -> tuple[BatchDescriptor, ...]:
        """The captured descriptors, in order of capture."""
        return tuple(self._captured)

    def __getitem__(self, descriptor: BatchDescriptor) -> CapturedGraph:
        """Return the captured bucket. Raises `GraphNotCaptured`."""
        return self._find(descriptor).graph

    def costs(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """Return the number of steps of a replay by cost, such as `{"graph": 29, "launch": 28}` (`ReplayStep.cost`)."""
        return self._find(descriptor).graph.plan.costs()

    def notes(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """Return the reasons why split ops cost more than a launch, with the number of split ops of each."""
        return self._find(descriptor).graph.plan.notes()

    def replay(self, descriptor: BatchDescriptor, *args: Any, out: Any = None) -> Any:
        """Run the graph of `descriptor` and return its outputs, which are views valid until the pool's next replay.

        Without `args` the graph runs over the current static inputs. With `args`, the shape, dtype and device of each
        argument are checked, and the argument is copied into its static input, unless it is that very tensor. `out`,
        nested like the result, receives a copy of the result and is returned instead. A replay never captures.

        Raises `GraphNotCaptured` (listing the captured sizes), `InputMismatch`, and `CaptureError` if a captured tensor
        moved, a weight was replaced, or the graphs are closed.

        Every replay checks the static inputs before it launches the graph, and the other tensors while the GPU runs.
        The late check is safe: the memory of those tensors is kept alive, so the graph never reads another tensor's
        memory, and after an error no result is returned. Once in `check_interval` replays, the complete check runs
        before the launch.
        """
        replayed = self._captured.get(descriptor) or self._find(descriptor)
        graph = replayed.graph
        replayed.inputs.check()
        if args:
            fill_static_inputs(descriptor, graph.static_inputs, args)
        if replayed.until_check == 0:
            self._check_weights(closely=True)  # first, because its error says what to do
            check_addresses((*graph.watched, *graph.bound))
            replayed.until_check = self._check_interval
        replayed.until_check -= 1
        if not self._runs_beside:
            self._check()
        if torch.is_grad_enabled():
            with torch.no_grad():
                graph.plan.run()
        else:  # entering no_grad costs as much as 20 replay steps
            graph.plan.run()
        if self._runs_beside:  # Note [checked while the GPU runs]: the GPU has its work, so the check delays nothing
            self._check()
        return graph.result if out is None else _copied_to(graph.result, out)

    def add(self, other: Graphs) -> None:
        """Take over the graphs of `other`, captured later over the same step and pool; `other` is closed afterwards."""
        assert (other.mode, other.pool) == (self.mode, self.pool) and not self._closed, "graphs of another capture"
        if not self._captured:
            self._watched = other._watched
        self._captured |= other._captured
        self.failed = (*self.failed, *other.failed)
        for each in other._weights:
            if any(each is known for known in self._weights):
                each.unpin()  # pinned by both
            else:
                self._weights = (*self._weights, each)
        self._runs_beside = other._runs_beside
        other._captured, other._weights = {}, ()
        other.close()

    def ledger(self) -> dict[BatchDescriptor, int]:
        """Return the bytes by which the pool grew for each graph."""
        return {descriptor: replayed.graph.nbytes for descriptor, replayed in self._captured.items()}

    def close(self) -> None:
        """Free every graph and release the pool. Idempotent.

        Note [graphs before process groups]: close graphs before process groups are destroyed, because a graph that
        holds collectives must not outlive their communicator.
        """
        for replayed in self._captured.values():
            replayed.graph.release()
        for each in self._weights:
            each.unpin()
        self._weights = ()
        self._watched = Addresses(())
        self._captured = {}
        self._closed = True
        self.pool = None

    def __enter__(self) -> Graphs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check(self) -> None:
        """Check addresses and weights, as every replay does besides checking its static inputs."""
        self._watched.check()
        self._check_weights()

    def _check_weights(self, *, closely: bool = False) -> None:
        for each in self._weights:
            if (closely or not each.are_unchanged()) and (problem := each.describe_changes()):
                raise CaptureError(f"the graphs read weights that the module no longer has: {problem}")

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
    """A captured graph, the addresses of its static inputs, and the number of replays until the next complete check."""

    __slots__ = ("graph", "inputs", "until_check")

    def __init__(self, graph: CapturedGraph) -> None:
        self.graph = graph
        self.inputs = Addresses(graph.inputs)
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
