"""The device reads what the host has written without a copy; a ring reuses buffers that nothing reads any more."""

from __future__ import annotations

import gc

import pytest
import torch

from piecegraph.runner.device_memory.host_memory import uva
from piecegraph.runner.device_memory.host_memory.uva import SMALLEST, UvaBuffer, UvaRing, UvaTensor
from tests.runner.no_sync import no_sync

CPU = torch.device("cpu")

DTYPES = [torch.int32, torch.int64, torch.float32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_views_are_the_same_tensor_on_a_cpu(dtype: torch.dtype) -> None:
    made = UvaTensor((2, 3), dtype, torch.device("cpu"))
    assert made.gpu is made.cpu
    assert made.gpu.dtype == dtype and made.gpu.tolist() == [[0] * 3] * 2
    made.np[1] = 1
    assert made.gpu.tolist() == [[0] * 3, [1] * 3]


def test_a_type_that_numpy_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="BFloat16"):
        UvaTensor((2,), torch.bfloat16, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_sees_the_hosts_memory(dtype: torch.dtype) -> None:
    made = UvaTensor((4, 5), dtype, torch.device("cuda"))
    assert made.gpu.is_cuda and made.cpu.is_pinned()
    assert made.gpu.data_ptr() == made.cpu.data_ptr()
    assert (made.gpu.shape, made.gpu.stride(), made.gpu.dtype) == (made.cpu.shape, made.cpu.stride(), dtype)
    assert made.gpu.count_nonzero().item() == 0
    made.np[2, 1:3] = 1
    assert torch.equal(made.gpu.clone().cpu(), made.cpu)
    made.cpu[3, 4] = 1
    assert torch.equal(made.gpu.clone().cpu(), made.cpu)


@pytest.mark.gpu
def test_a_kernel_reads_what_the_host_wrote_before_it() -> None:
    """Rows written while other rows are being read, launch after launch, with nobody waiting."""
    width, num_steps = 1000, 20
    made = UvaTensor((num_steps, width), torch.int32, torch.device("cuda"))
    out = torch.full((num_steps, width), -1, dtype=torch.int32, device="cuda")

    def write_and_read(step: int) -> None:
        made.np[step] = range(step * width, (step + 1) * width)
        torch.add(made.gpu[step], 0, out=out[step])

    write_and_read(0)  # loads the kernel
    torch.cuda.synchronize()
    with no_sync():
        torch.cuda._sleep(50_000_000)
        for step in range(num_steps):
            write_and_read(step)
    assert torch.equal(out.flatten().cpu(), torch.arange(num_steps * width, dtype=torch.int32))


@pytest.mark.gpu
def test_a_replayed_graph_reads_what_the_host_writes_between_replays() -> None:
    made = UvaTensor((2, 300), torch.int64, torch.device("cuda"))
    out = torch.empty_like(made.gpu)
    out.copy_(made.gpu)  # before the capture, as torch asks
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(made.gpu + 1)
    for value in (3, 2**40):
        made.np[:] = value
        graph.replay()
        torch.cuda.synchronize()
        assert out.unique().tolist() == [value + 1]


@pytest.mark.gpu
def test_the_devices_view_keeps_the_memory() -> None:
    made = UvaTensor((300,), torch.int32, torch.device("cuda"))
    made.np[:] = 5
    view = made.gpu
    del made
    gc.collect()
    others = [torch.full((300,), 6, dtype=torch.int32).pin_memory() for _ in range(8)]  # would take it
    assert view.clone().unique().tolist() == [5]
    assert all(other.data_ptr() != view.data_ptr() for other in others)


def test_buffers_are_as_large_as_a_power_of_two() -> None:
    ring = UvaRing(CPU)
    for asked, capacity in ((1, SMALLEST), (SMALLEST, SMALLEST), (SMALLEST + 1, 2 * SMALLEST), (5000, 8192)):
        buffer = ring.take(asked)
        assert buffer.np.shape == tuple(buffer.gpu.shape) == (capacity,)


def test_only_buffers_that_were_read_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = False
    monkeypatch.setattr(uva.UvaBuffer, "is_free", property(lambda buffer: is_free))
    ring = UvaRing(CPU)
    first, second = ring.take(1), ring.take(1)
    assert first is not second
    is_free = True
    assert ring.take(1) is first
    assert ring.take(1) is second
    assert ring.take(2 * SMALLEST) not in (first, second)


@pytest.mark.gpu
def test_late_kernels_read_the_values_written_for_them() -> None:
    """While the device is busy every step has a buffer of its own; once it is done, none is made any more."""
    num_steps, width = 20, 1000
    ring = UvaRing(torch.device("cuda"))
    out = torch.full((num_steps, width), -1, dtype=torch.int32, device="cuda")
    taken: list[UvaBuffer] = []

    def write_and_read(step: int) -> None:
        buffer = ring.take(width)
        buffer.np[:width] = range(step * width, (step + 1) * width)
        torch.add(buffer.gpu[:width], 0, out=out[step])
        buffer.read_until_here()
        taken.append(buffer)

    write_and_read(0)  # loads the kernel
    torch.cuda.synchronize()
    with no_sync():
        torch.cuda._sleep(50_000_000)
        for step in range(num_steps):
            write_and_read(step)
    assert torch.equal(out.flatten().cpu(), torch.arange(num_steps * width, dtype=torch.int32))
    assert len(set(map(id, taken))) == num_steps
    write_and_read(0)
    assert taken[-1] in taken[:-1]
