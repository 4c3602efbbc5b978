"""Recorders of functions over fixed buffers: as CUDA graphs, or without a GPU as functions under the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piecegraph.compiler.graphs.recording.cuda_graph import (
    abandon_capture,
    alias_without_ownership,
    forget_cublas_workspaces,
    pool_bytes,
)
from piecegraph.compiler.graphs.recording.kernel_calls import record_calls
from piecegraph.compiler.torch_compat.versions import graph_exec_handle
from piecegraph.errors import CaptureError

Outputs = Sequence[Any]  # tensors, and sizes as numbers


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded function: `replay` writes `outputs` again, `release` frees the recording."""

    replay: Callable[[], None]
    outputs: tuple[Any, ...]
    release: Callable[[], None]
    graph_exec: int | None = None  # the handle of the instantiated CUDA graph, if its nodes will be changed


class Recorder(Protocol):
    """A recorder of functions without arguments, one after the other, in one memory pool on one stream.

    Recordings that belong together must be replayed in the order in which they were recorded, because they share
    memory.
    """

    kind: str

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context for warm-up and recording, which makes the recorder's stream current inside."""

    def record(
        self, run: Callable[[], Outputs], *, is_patched: bool = False, dispatches_all: bool = False
    ) -> Recording:
        """Run `run` once and return its recording. An error of `run` propagates and leaves no partial recording.

        `is_patched` says that nodes of the graph will be changed before replays. `dispatches_all` says that `run` reads
        and writes tensors by torch's ops alone: it is no code of a user, and none that Inductor generated.
        """

    def weak(self, value: Any) -> Any:
        """Return `value` over the same memory without keeping that memory, which the recording may reuse."""

    def used_bytes(self) -> int:
        """Return the bytes that the pool holds now."""


class CudaRecorder:
    """A recorder of CUDA graphs in one pool, captured on one stream."""

    kind = "cuda"

    def __init__(self, device: torch.device, pool: Any = None, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.stream = torch.cuda.Stream(device) if stream is None else stream

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the recorder's stream is current, after it has waited for the caller's stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def record(
        self, run: Callable[[], Outputs], *, is_patched: bool = False, dispatches_all: bool = False
    ) -> Recording:
        """Capture `run` as a CUDA graph; its graph is kept and instantiated if nodes will be patched."""
        graph = torch.cuda.CUDAGraph(keep_graph=is_patched)  # the nodes have handles while the graph is kept
        forget_cublas_workspaces()  # so that the graph takes one from this pool, not one that eager calls share
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            outputs = tuple(run())
        except BaseException:
            abandon_capture(graph)
            raise
        graph.capture_end()
        forget_cublas_workspaces()  # so that no other call keeps this one
        if not is_patched:
            return Recording(graph.replay, outputs, graph.reset)
        graph.instantiate()
        return Recording(graph.replay, outputs, graph.reset, graph_exec_handle(graph))

    def weak(self, value: Any) -> Any:
        """Return an alias of a CUDA tensor that does not keep its memory; any other value unchanged."""
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return alias_without_ownership(value)
        return value

    def used_bytes(self) -> int:
        """Return the bytes that the graph pool holds now."""
        return pool_bytes(self.pool)


class FunctionRecorder:
    """A recorder for a CPU (`kind="recorded"`), under every rule of a CUDA graph.

    A function that does nothing but call our C++ kernels becomes the list of their calls (`kernel_calls.py`). Any other
    is kept and run again over its buffers: its results are copied into the outputs of the first run, whose addresses
    therefore stay, and its replay is not faster.
    """

    kind = "recorded"

    def __init__(self) -> None:
        self._bytes = 0

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def record(
        self, run: Callable[[], Outputs], *, is_patched: bool = False, dispatches_all: bool = False
    ) -> Recording:
        """Run `run` and keep its calls, or itself, for replays, with its outputs as fixed buffers."""
        if dispatches_all and (recorded := record_calls(run)) is not None:
            return self._kept(recorded.replay, recorded.outputs, (*recorded.outputs, *recorded.memory))
        outputs = tuple(run())

        def run_again() -> None:
            for kept, value in zip(outputs, run(), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != value.data_ptr():
                    kept.copy_(value)

        return self._kept(run_again, outputs, outputs)

    def _kept(self, run_again: Callable[[], None], outputs: tuple[Any, ...], memory: Iterable[Any]) -> Recording:
        """Return the recording of what `run_again` does, which keeps `memory` as long as it is not released."""
        storages = {one.data_ptr(): one for one in (each.untyped_storage() for each in memory if _is_tensor(each))}
        own = sum(one.nbytes() for one in storages.values())
        self._bytes += own
        released = False

        def replay() -> None:
            if released:
                raise CaptureError("this graph was released; its Graphs are closed.")
            run_again()

        def release() -> None:
            nonlocal released
            if not released:
                self._bytes -= own
            released = True

        return Recording(replay, outputs, release)

    def weak(self, value: Any) -> Any:
        """Return `value` unchanged."""
        return value

    def used_bytes(self) -> int:
        """Return the bytes of recordings that are not released."""
        return self._bytes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def make_recorder(kind: str, device: torch.device, pool: Any = None, stream: Any = None) -> Recorder:
    """Return the recorder that `kind` names; `"auto"` is `"cuda"` on a CUDA device, otherwise `"recorded"`.

    Raises `CaptureError` where CUDA graphs are asked for and there is no CUDA device.
    """
    if kind not in ("auto", "cuda", "recorded"):
        raise CaptureError(f"kind={kind!r} is unknown; it is 'auto', 'cuda' or 'recorded'.")
    if kind == "cuda" and device.type != "cuda":
        raise CaptureError(
            f"kind='cuda' needs static inputs on a CUDA device; they are on {device}. Use kind='recorded'."
        )
    if kind == "recorded" or device.type != "cuda":
        if stream is not None or (pool is not None and device.type != "cuda"):
            raise CaptureError("pool and stream belong to CUDA graphs; kind='recorded' has neither. Leave them out.")
        return FunctionRecorder()
    return CudaRecorder(device, pool, stream)
