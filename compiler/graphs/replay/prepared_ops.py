"""Prepared split ops, which a replay launches without a dispatch by torch: prepared once, launched many times.

The registry is global, like torch's registry of ops: an op belongs to the process, and so does the way to launch it. It
is read when graphs are captured, never at replay, and holds no tensors and no batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from piecegraph.compiler.common.split_ops import refuse_unregistered
from piecegraph.errors import UsageError

Launch = Callable[[Any], object]
"""Takes the value that `metadata()` returned; its own result is ignored."""

Prepare = Callable[..., Launch | str | None]
"""Takes the op's arguments and returns its launch; None, or a reason as text, if the call must be dispatched."""

ReadMetadata = Callable[[], Any]

Kind = Callable[..., tuple[Any, ...]]
"""Takes the op's arguments and returns what its kernels are chosen by: tensors, and hashable values."""

Patch = Callable[[int, Any], None]
"""Takes the handle of an instantiated graph and the metadata, and updates nodes of the graph before a replay."""


@runtime_checkable
class PatchableLaunch(Protocol):
    """A launch that can be part of a graph, in which its kernels are updated instead of launched.

    A bucket whose split ops all have patchable launches is one graph for any batch.
    """

    def __call__(self, metadata: Any) -> object:
        """Launch on the current stream."""

    def unpatchable_reason(self) -> str | None:
        """Return why the launch must stay between graphs, or None. Called after the first launch."""

    def record(self, metadata: Any) -> Patch:
        """Launch every kernel that any batch uses on the current stream, which is capturing, so none of them runs."""


@dataclass(frozen=True, slots=True)
class PreparedOp:
    """The registration of how one split op is launched at replay."""

    op: str
    prepare: Prepare
    metadata: ReadMetadata
    kind: Kind | None = None  # None: any two calls may use different kernels


class PrepareRegistration:
    """The result of `register_prepare`. `remove`, or leaving it as a context, ends the registration."""

    def __init__(self, prepared: PreparedOp) -> None:
        self._prepared = prepared

    def remove(self) -> None:
        """Make later captures dispatch the op; captured graphs stay as they are. Idempotent."""
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
    op: str, prepare: Prepare, metadata: ReadMetadata, kind: Kind | None = None
) -> PrepareRegistration:
    """Replay `op` (`"namespace::name"`) by launches prepared at capture instead of dispatching it.

    `prepare(*args, **kwargs) -> launch` receives exactly the op's arguments, once per call of the op when a PIECEWISE
    bucket is captured, and when a warm-up runs the call. The tensors are aliases at the addresses that every replay
    uses: the launch may keep them, but they do not keep the memory alive. `launch(metadata)` must do what the op does
    on the current stream, each time it is called. If `prepare` returns None, or a reason as text, the call is
    dispatched.

    `metadata()` is called once per replay and per warm-up run, before anything is launched, and its value is passed to
    every launch: it is the place to read a context of the caller. Ops registered with the same function share the call.

    A launch that is a `PatchableLaunch` becomes part of the surrounding graph on a GPU whose driver can change the
    kernels of a graph.

    `kind(*args, **kwargs)`, called in the same context as `prepare`, returns everything that the kernels of a call are
    chosen by, and nothing else: calls of one bucket with equal kinds (for tensors: equal dtype, device, shape, strides
    and alignment) use the same kernels. A warm-up that need not run everything runs only the first of such calls, so
    equal layers add little to a capture. The name of a layer is not part of its kind, but what depends on the name is.
    Without `kind`, every call runs.

    Only an op that writes in place can be prepared; an op that returns a tensor is dispatched. Raises `SplitOpNotFound`
    for an unregistered op, and `UsageError` for an op that has a prepare already.
    """
    refuse_unregistered(op, "Define the op before you register its prepare.")
    prepared = PreparedOp(op, prepare, metadata, kind)
    with _lock:
        if op in _prepared_ops:
            raise UsageError(
                f"{op} has a prepare already; call remove() on what register_prepare returned before registering "
                "another."
            )
        _prepared_ops[op] = prepared
    return PrepareRegistration(prepared)


def prepared_ops() -> Mapping[str, PreparedOp]:
    """Return the current registrations, by op."""
    with _lock:
        return dict(_prepared_ops)
