"""Record a function over fixed buffers and run it again: as a CUDA graph, or, where there is no GPU,
as the function itself with the same rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piecegraph.compiler.graphs.cuda_graph import (
    abandon_capture,
    alias_without_ownership,
    forget_cublas_workspaces,
    pool_bytes,
)
from piecegraph.compiler.graphs.growing_segments import growing_segments
from piecegraph.compiler.torch_compat import graph_exec_of
from piecegraph.errors import CaptureError

ROOM = 1.25
"""Of what a run takes at its peak: an allocator that fills gaps needs some more for all to fit."""

Outputs = Sequence[Any]  # tensors, and sizes as numbers


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded function: `replay` writes `outputs` again. `release` frees it."""

    replay: Callable[[], None]
    outputs: tuple[Any, ...]
    release: Callable[[], None]
    graph_exec: int | None = None  # the instantiated CUDA graph's handle, where its nodes are to be changed


class Recorder(Protocol):
    """Records functions of no arguments, one after the other, in one memory pool on one stream.

    Replays of recordings that belong together must run in the order they were recorded: memory a
    later one frees is used again.
    """

    kind: str

    def on_stream(self) -> AbstractContextManager[Any]:
        """Warm-up and recording happen inside this; the caller's stream is current again after it."""

    def record(self, run: Callable[[], Outputs], *, is_patched: bool = False) -> Recording:
        """Run once, recording. Whatever `run` raises leaves no half-made recording behind.

        `is_patched`: nodes of it will be changed before replays.
        """

    def sized(self) -> AbstractContextManager[None]:
        """The pool begins, with the next recording, as one stretch of a little more memory than what runs in here
        takes at its peak. In one stretch layers that are alike are soon given the same memory (`copied_steps.py`), and
        the gaps between others take none of the GPU's. Resets torch's peak memory statistics."""

    def weak(self, value: Any) -> Any:
        """The same memory without keeping it: it stays the recording's to reuse."""

    def used_bytes(self) -> int:
        """Bytes the pool holds now."""


class CudaRecorder:
    """CUDA graphs in one pool, captured on one stream."""

    kind = "cuda"

    def __init__(self, device: torch.device, pool: Any = None, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.stream = torch.cuda.Stream(device) if stream is None else stream
        self._reserved = 0

    @contextmanager
    def sized(self) -> Iterator[None]:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        taken = torch.cuda.max_memory_allocated(self.device) - before
        self._reserved = max(int(taken * ROOM) - self.used_bytes(), 0)

    def on_stream(self) -> AbstractContextManager[Any]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def record(self, run: Callable[[], Outputs], *, is_patched: bool = False) -> Recording:
        with growing_segments(self.device):
            return self._record(run, is_patched)

    def _record(self, run: Callable[[], Outputs], is_patched: bool) -> Recording:
        graph = torch.cuda.CUDAGraph(keep_graph=is_patched)  # its nodes have handles while it is kept
        forget_cublas_workspaces()  # it is to take one from this pool, not one that eager calls share
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            reserved, self._reserved = self._reserved, 0
            if reserved:
                with contextlib.suppress(torch.OutOfMemoryError):  # then it begins as it comes
                    torch.empty(reserved, dtype=torch.uint8, device=self.device)  # let go at once
            outputs = tuple(run())
        except BaseException:
            abandon_capture(graph)
            raise
        graph.capture_end()
        forget_cublas_workspaces()  # and nobody else is to keep it
        if not is_patched:
            return Recording(graph.replay, outputs, graph.reset)
        graph.instantiate()
        return Recording(graph.replay, outputs, graph.reset, graph_exec_of(graph))

    def weak(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return alias_without_ownership(value)
        return value

    def used_bytes(self) -> int:
        return pool_bytes(self.pool)


class FunctionRecorder:
    """`kind="recorded"`: the function is kept and run again over its buffers; results are copied into
    the first run's outputs, whose addresses therefore stay. No speed, every other rule."""

    kind = "recorded"

    def __init__(self) -> None:
        self._bytes = 0

    def on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, run: Callable[[], Outputs], *, is_patched: bool = False) -> Recording:
        outputs = tuple(run())
        own = sum(value.untyped_storage().nbytes() for value in outputs if isinstance(value, torch.Tensor))
        self._bytes += own
        released = False

        def replay() -> None:
            if released:
                raise CaptureError("this graph was released; its Graphs are closed.")
            for kept, value in zip(outputs, run(), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != value.data_ptr():
                    kept.copy_(value)

        def release() -> None:
            nonlocal released
            if not released:
                self._bytes -= own
            released = True

        return Recording(replay, outputs, release)

    def sized(self) -> AbstractContextManager[None]:
        """It has no pool."""
        return nullcontext()

    def weak(self, value: Any) -> Any:
        return value

    def used_bytes(self) -> int:
        return self._bytes


def make_recorder(kind: str, device: torch.device, pool: Any = None, stream: Any = None) -> Recorder:
    """The recorder `kind` names; `"auto"` is `"cuda"` on a CUDA device, else `"recorded"`.

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
