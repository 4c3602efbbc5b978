"""The driver's calls for virtual memory: what can be said without a GPU, and what they do on one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from piecegraph.errors import OutOfMemory, PiecegraphError
from piecegraph.runner.device_memory import cuda_memory
from piecegraph.runner.device_memory.cuda_memory import CudaMemoryDriver, unavailable_reason


def test_a_cpu_has_no_virtual_memory() -> None:
    assert unavailable_reason(torch.device("cpu")) == "cpu is not an NVIDIA GPU"


def test_a_missing_driver_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> ctypes.CDLL:
        raise OSError

    monkeypatch.setattr(cuda_memory, "_library", library)
    assert unavailable_reason(torch.device("cuda")) == "no CUDA driver is installed"


def test_a_driver_without_the_calls_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "_library", object)
    reason = unavailable_reason(torch.device("cuda"))
    assert reason is not None and reason.startswith("the CUDA driver lacks cuDeviceGet, ")


def test_structures_have_the_drivers_layout() -> None:
    """The sizes and offsets are those of cuda.h on 64 bits."""
    assert ctypes.sizeof(cuda_memory._Properties) == 32
    assert cuda_memory._Properties.location.offset == 8
    assert ctypes.sizeof(cuda_memory._Access) == 12


def test_a_failed_driver_call_raises_its_error_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(result: int) -> int:
        return result

    monkeypatch.setattr(cuda_memory, "_library", lambda: SimpleNamespace(cuMemCreate=create))
    cuda_memory._call("cuMemCreate", 0)
    with pytest.raises(OutOfMemory, match="cuMemCreate of the CUDA driver found no memory left"):
        cuda_memory._call("cuMemCreate", 2)
    with pytest.raises(PiecegraphError, match=r"cuMemCreate of the CUDA driver failed with error 201\."):
        cuda_memory._call("cuMemCreate", 201)


@pytest.mark.gpu
def test_memory_is_mapped_at_reserved_addresses() -> None:
    device = torch.device("cuda")
    assert unavailable_reason(device) is None
    driver = CudaMemoryDriver(device)
    piece = driver.granularity
    assert piece >= 2**16 and piece & (piece - 1) == 0
    address = driver.reserve(4 * piece)
    handle = driver.create(piece)
    driver.map(address, piece, handle)
    driver.release(handle)
    driver.set_access(address, piece)
    tensor = driver.bytes_at(address, 4 * piece, None)
    assert tensor.data_ptr() == address and tensor.nbytes == 4 * piece and tensor.is_cuda
    tensor[:piece].fill_(3)
    assert tensor[:piece].sum().item() == 3 * piece
    driver.synchronize()
    driver.unmap(address, piece)
    driver.free(address, 4 * piece)


@pytest.mark.gpu
def test_more_memory_than_the_device_has_is_out_of_memory() -> None:
    driver = CudaMemoryDriver(torch.device("cuda"))
    total_bytes = torch.cuda.mem_get_info()[1]
    with pytest.raises(OutOfMemory, match="cuMemCreate"):
        driver.create(-(-2 * total_bytes // driver.granularity) * driver.granularity)
