"""What sends and receives words in Triton's interpreter, which runs no instructions of PTX."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from piecegraph.runner.tensor_parallel.symmetric_memory.kernels import words as words_of_kernels


def send(addresses: Any, words: Any, is_inside: Any) -> None:
    """Do what the kernel's instructions do."""
    tl.store(addresses.to(tl.pointer_type(tl.int64)), words, mask=is_inside)


def receive(addresses: Any, count: Any, stop: Any, is_inside: Any) -> Any:
    """Do what the kernel's instructions do."""
    deadline = time.monotonic() + 30
    while True:
        words = tl.load(addresses.to(tl.pointer_type(tl.int64)), mask=is_inside, other=0)
        inside = is_inside.handle.data
        if ((words.handle.data >> 32)[inside] == count.handle.data[inside]).all():
            return words.to(tl.int32)
        assert time.monotonic() < deadline, "the other rank's words did not come"


def replace_instructions(kernel: Any) -> None:
    """Make the kernels of a module send and receive by the functions above, also where they add up."""
    kernel.send, kernel.receive = send, receive
    words_of_kernels.receive = receive


def part(number: int, rank: int, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """Return what a rank adds; integers in bfloat16, to which the interpreter does not round. `sizes` are in bytes."""
    dtype = dtypes[number % len(dtypes)]
    x = torch.randn(sizes[number % len(sizes)] // dtype.itemsize, generator=torch.Generator().manual_seed(number))
    x *= rank + 3
    return x.round().to(dtype) if dtype == torch.bfloat16 else x.to(dtype)
