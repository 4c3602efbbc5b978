"""Sums in two steps: three ranks in Triton's interpreter, inboxes in shared memory; compiled for sm_90."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch

from piecegraph.runner.tensor_parallel.symmetric_memory.kernels import pushed_twice as kernel
from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.words import BLOCK, NUM_WARPS, Inboxes
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted
from tests.runner.tensor_parallel.symmetric_memory.kernels import words_in_interpreter

RANKS = 3
SIZES = (4, 24, 4 * BLOCK, 4 * BLOCK + 4, 8 * BLOCK + 400, 24, 12 * BLOCK, 30 * BLOCK + 12)
"""In bytes: less than the part of one rank, a part of two, and several programs, in turns, so that counts differ."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


part = functools.partial(words_in_interpreter.part, sizes=SIZES, dtypes=DTYPES)


def check_sums() -> None:
    """Add up 24 times on three ranks, one of them late at times, in place and not."""
    torch.set_num_threads(1)  # a forked process has no threads of torch's
    words_in_interpreter.replace_instructions(kernel)
    capacity = 12 * BLOCK
    boxes = torch.zeros(RANKS, 2, RANKS, capacity, dtype=torch.int64).share_memory_()
    addresses = [box.data_ptr() for box in boxes]
    children = []
    for rank in range(1, RANKS):
        child = os.fork()
        if child == 0:
            equal = False
            try:
                equal = has_the_sums(addresses, capacity, rank)
            finally:
                os._exit(0 if equal else 1)
        children.append(child)
    equal = has_the_sums(addresses, capacity, 0)
    assert equal and [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def has_the_sums(addresses: list[int], capacity: int, rank: int) -> bool:
    boxes = Inboxes.of(addresses, capacity, rank, torch.zeros(1, dtype=torch.int32), torch.device("cpu"))
    equal = True
    for number in range(24):
        x = part(number, rank)
        output = x if number % 2 else torch.empty_like(x)
        if number % 5 == rank:
            time.sleep(0.05)
        kernel.push_twice_and_add_up(x, output, boxes)
        expected = part(number, 0).float()
        for other in range(1, RANKS):
            expected = expected + part(number, other).float()
        equal &= torch.equal(output, expected.to(x.dtype))
    return equal


def test_three_ranks_have_the_sum() -> None:
    """In the order of the ranks, rounded once."""
    interpreted(check_sums)


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_compiles_for_hopper(dtype: torch.dtype, num_ranks: int) -> None:
    """A word is sent and received whole, with the scope of several GPUs, twice for each other rank."""
    x, counts = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    ptx = compile_for_gpu(
        kernel.pushed_twice_kernel,
        {"x": x, "output": x, "inboxes": torch.zeros(num_ranks, dtype=torch.int64), "counts": counts, "stop": counts}
        | {"num_words": 2048, "zero": 0, "CAPACITY": 2**19, "RANK": 1, "RANKS": num_ranks}
        | {"BLOCK": BLOCK, "OVERLAP": True},
        {"num_warps": NUM_WARPS, "launch_pdl": True},
    )
    assert ptx.count("st.relaxed.sys.global.b64") == 8 * (num_ranks - 1) == ptx.count("ld.relaxed.sys.global.b64")
