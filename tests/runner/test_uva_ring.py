"""A ring gives out memory that nothing reads any more, and makes no more of it than is read at once."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner import uva_ring
from piecegraph.runner.uva_ring import SMALLEST, UvaBuffer, UvaRing

CPU = torch.device("cpu")


def test_buffers_are_as_large_as_a_power_of_two() -> None:
    ring = UvaRing(CPU)
    for asked, capacity in ((1, SMALLEST), (SMALLEST, SMALLEST), (SMALLEST + 1, 2 * SMALLEST), (5000, 8192)):
        buffer = ring.take(asked)
        assert buffer.np.shape == tuple(buffer.gpu.shape) == (capacity,)


def test_what_is_read_is_given_out_again_and_what_is_not_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = False
    monkeypatch.setattr(uva_ring.UvaBuffer, "is_free", property(lambda buffer: is_free))
    ring = UvaRing(CPU)
    first, second = ring.take(1), ring.take(1)
    assert first is not second
    is_free = True
    assert ring.take(1) is first
    assert ring.take(1) is second
    assert ring.take(2 * SMALLEST) not in (first, second)


@pytest.mark.gpu
def test_kernels_read_what_was_written_for_them_however_late_they_run() -> None:
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50_000_000)
        for step in range(num_steps):
            write_and_read(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out.flatten().cpu(), torch.arange(num_steps * width, dtype=torch.int32))
    assert len(set(map(id, taken))) == num_steps
    write_and_read(0)
    assert taken[-1] in taken[:-1]
