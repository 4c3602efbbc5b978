"""Lists and arrays reach a device as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from piecegraph.runner.device_memory.host_memory.host_copy import to_device


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_of_lists_and_arrays_are_copied(device: str) -> None:
    numbers = np.arange(7) * 2
    found = to_device(numbers, torch.int32, torch.device(device))
    numbers[:] = 0  # the copy is the tensor's own
    assert found.tolist() == [0, 2, 4, 6, 8, 10, 12] and found.dtype == torch.int32
    assert to_device([1.5, 2.0**-40], torch.float64, torch.device(device)).tolist() == [1.5, 2.0**-40]
    assert to_device(np.array([True, False]), torch.bool, torch.device(device)).tolist() == [True, False]
    assert to_device([], torch.int64, torch.device(device)).shape == (0,)
