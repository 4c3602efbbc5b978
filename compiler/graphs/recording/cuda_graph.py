"""Helpers for torch's CUDA graphs: aliases, memory pools, and captures that failed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def alias_without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CUDA tensor over the same memory that does not keep the memory, so a graph pool may reuse it."""
    address = tensor.untyped_storage().data_ptr()
    nbytes = tensor.untyped_storage().nbytes()
    storage = torch._C._construct_storage_from_data_pointer(address, tensor.device, nbytes)
    metadata = {
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)


def pool_bytes(pool: Any) -> int:
    """Return the bytes of device memory that a CUDA graph pool holds."""
    segments = torch.cuda.memory.memory_snapshot(pool, include_traces=False)
    return sum(int(segment["total_size"]) for segment in segments)


def forget_cublas_workspaces() -> None:
    """Release cuBLAS's workspaces, which it keeps per stream; the workspace of a captured graph stays in its pool."""
    torch._C._cuda_clearCublasWorkspaces()


def abandon_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a failed capture, whatever its state, and free its memory."""
    try:
        graph.capture_end()
    except RuntimeError:  # the capture was invalid, and torch left its generators in capture mode
        with contextlib.suppress(RuntimeError):
            _capture_one_kernel()
    with contextlib.suppress(RuntimeError):
        graph.reset()


def _capture_one_kernel() -> None:
    """Capture a single kernel on the current stream.

    The end of a valid capture takes torch's random generators out of capture mode. Otherwise `torch.rand` fails in the
    whole process ("Offset increment outside graph capture") until the next capture.
    """
    flag = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        flag.zero_()
    finally:
        graph.capture_end()
        graph.reset()
