"""Memory of the driver's own: torch sees it as a tensor, and it is given back, whatever happens with it."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import CaptureError
from piecegraph.runner.borrowed_memory import borrowed

GPU = torch.device("cuda", 0)


@pytest.mark.gpu
def test_it_is_a_tensor_inside_the_block() -> None:
    with borrowed(GPU, 2**20) as memory:
        assert memory.shape == (2**20,) and memory.dtype == torch.uint8 and memory.device == GPU
        assert memory.data_ptr() % 256 == 0
        memory.fill_(7)
        assert (memory == 7).all()


@pytest.mark.gpu
def test_it_is_given_back_and_none_of_it_was_torchs() -> None:
    torch.zeros(1, device=GPU)
    before = torch.cuda.memory_reserved(GPU), torch.cuda.mem_get_info(GPU)[0]
    with pytest.raises(RuntimeError, match="as they should not"):
        fail_with_a_gibibyte(*before)
    assert before[1] - torch.cuda.mem_get_info(GPU)[0] < 2**29


def fail_with_a_gibibyte(reserved: int, free: int) -> None:
    with borrowed(GPU, 2**30) as memory:
        memory.zero_()
        assert torch.cuda.memory_reserved(GPU) == reserved
        assert free - torch.cuda.mem_get_info(GPU)[0] >= 2**30
        raise RuntimeError("as they should not")


@pytest.mark.gpu
def test_more_than_the_device_has_is_an_error() -> None:
    with pytest.raises(CaptureError, match="cuMemAlloc"), borrowed(GPU, 2**50):
        raise AssertionError("it had")
