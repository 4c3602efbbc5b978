"""Split ops that are launched at replay without a dispatch by torch: prepared once, launched many times.

The register is global, as torch's own register of ops is: an op is the process's, and so is the way
to launch it. It is read when graphs are captured, never at replay, and holds no tensor and no batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from piecegraph.compiler.split_ops import refuse_unregistered
from piecegraph.errors import UsageError

Launch = Callable[[Any], object]
"""Takes what `metadata()` returned; what it returns is ignored."""

Prepare = Callable[..., Launch | str | None]
"""The op's arguments to its launch; None, or the reason as text, where this call has to be dispatched."""

ReadMetadata = Callable[[], Any]

Kind = Callable[..., tuple[Any, ...]]
"""The op's arguments to what its kernels are chosen by: tensors, and hashable values."""

Patch = Callable[[int, Any], None]
"""Changes nodes of an instantiated graph (its handle) to what the metadata asks for, before a replay."""


@runtime_checkable
class MovablePatch(Protocol):
    """A patch that can do the same for nodes that are copies of its own."""

    def __call__(self, graph_exec: int, metadata: Any) -> None: ...

    def moved(self, nodes: Mapping[int, int], move: Callable[[int], int]) -> Patch:
        """`nodes`: the copy of each node, by handle. `move`: of an address its kernels are given, the copy's; any other
        number stays as it is."""


@runtime_checkable
class PatchableLaunch(Protocol):
    """A launch that may be part of a graph: its kernels are changed there instead of being launched.

    A bucket whose split ops are all such is one graph, whatever their batch.
    """

    def __call__(self, metadata: Any) -> object:
        """Launch on the current stream."""

    def unpatchable_reason(self) -> str | None:
        """Why it has to stay between graphs, or None. Asked after its first call."""

    def record(self, metadata: Any) -> Patch:
        """Launch, on the current stream, which is capturing, every kernel that some batch takes; none of
        them runs now."""


@dataclass(frozen=True, slots=True)
class PreparedOp:
    """How one split op is launched at replay."""

    op: str
    prepare: Prepare
    metadata: ReadMetadata
    kind: Kind | None = None  # None: no two calls are known to take the same kernels
    may_copy: bool = False  # calls whose kinds agree launch the same over other tensors of their kind


class PrepareRegistration:
    """What `register_prepare` returns. `remove` ends it, and so does leaving it as a context."""

    def __init__(self, prepared: PreparedOp) -> None:
        self._prepared = prepared

    def remove(self) -> None:
        """Captures from now on dispatch the op; what was captured stays. Harmless when repeated."""
        with _lock:
            if _prepared_ops.get(self._prepared.op) is self._prepared:
                del _prepared_ops[self._prepared.op]

    def __enter__(self) -> PrepareRegistration:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


_lock = threading.Lock()
_prepared_ops: dict[str, PreparedOp] = {}


def register_prepare(
    op: str, prepare: Prepare, metadata: ReadMetadata, kind: Kind | None = None, *, may_copy: bool = False
) -> PrepareRegistration:
    """Replay `op` (`"namespace::name"`) by launches prepared at capture instead of dispatching it.

    `prepare(*args, **kwargs) -> launch` is called with exactly the op's arguments, once per call of the
    op when a PIECEWISE bucket is captured (and when a warm-up runs it). The tensors are aliases at
    the addresses every replay uses: the launch may keep them, and must not rely on them keeping the
    memory. `launch(metadata)` must then do what the op does, on the current stream, as often as it is
    called. A `prepare` that returns None, or a text that says why, has this call dispatched.

    `metadata()` is called once per replay (and per warm-up run), before anything is launched, and its
    value given to every launch: the place to read a context of the caller's. Ops registered with the
    same function share the call.

    A launch that is a `PatchableLaunch` becomes part of the graph around it on a GPU whose driver can
    change the kernels of a graph.

    `kind(*args, **kwargs)`, called within a capture's context as `prepare` is, tells what the kernels of a call are
    chosen by, nothing else: calls of one bucket that agree in it (of tensors: in dtype, device, shape, strides and
    alignment) take the same kernels. Of those only the first runs in a warm-up that need not run everything, so that
    equal layers cost a capture little. A name of the layer does not belong to it; what differs with the name does.
    Without `kind` every call runs.

    `may_copy`: `kind` tells more, so that where layers repeat copies of one's nodes in a graph may stand for another's:
    it returns every tensor that a call reads or writes besides the metadata's, and every number that a call gives its
    kernels, or finds under its name, and that another layer's may have otherwise. Calls that agree in it launch the
    same kernels with the same numbers over those tensors. All that it returns but arguments of the call is the same in
    every bucket.

    Only an op that writes in place can be prepared; one that returns a tensor is dispatched. Raises
    `SplitOpNotFound` for an op that is registered nowhere, `UsageError` for one prepared already.
    """
    refuse_unregistered(op, "Define the op before you register its prepare.")
    prepared = PreparedOp(op, prepare, metadata, kind, may_copy)
    with _lock:
        if op in _prepared_ops:
            raise UsageError(
                f"{op} has a prepare already; call remove() on what register_prepare returned before registering "
                "another."
            )
        _prepared_ops[op] = prepared
    return PrepareRegistration(prepared)


def prepared_ops() -> Mapping[str, PreparedOp]:
    """What is registered now, by op."""
    with _lock:
        return dict(_prepared_ops)
