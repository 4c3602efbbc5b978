"""What a recorder asks of torch's CUDA graphs, their memory pool, and captures that went wrong."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def alias_without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor over the same memory that does not keep it: a graph pool may hand it out again."""
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
    """Bytes of device memory a CUDA graph pool holds."""
    segments = torch.cuda.memory.memory_snapshot(pool, include_traces=False)
    return sum(int(segment["total_size"]) for segment in segments)


def forget_cublas_workspaces() -> None:
    """Let go of the scratch memory cuBLAS keeps per stream: what a graph captured with stays in its pool."""
    torch._C._cuda_clearCublasWorkspaces()


def abandon_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that went wrong, whatever state it is in, and free what it took."""
    try:
        graph.capture_end()
    except RuntimeError:  # it was invalid: torch does not tell its generators that it is over
        with contextlib.suppress(RuntimeError):
            _capture_next_to_nothing()
    with contextlib.suppress(RuntimeError):
        graph.reset()


def _capture_next_to_nothing() -> None:
    """On the current stream. The end of a good capture takes torch's random generators out of any: else
    `torch.rand` fails in the whole process ("Offset increment outside graph capture"), until the next one."""
    flag = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        flag.zero_()
    finally:
        graph.capture_end()
        graph.reset()
