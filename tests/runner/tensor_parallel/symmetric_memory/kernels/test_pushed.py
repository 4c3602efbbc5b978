"""Collectives by pushed words: two ranks in Triton's interpreter, inboxes in shared memory; compiled for sm_90."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch

from piecegraph.runner.tensor_parallel.symmetric_memory.kernels import pushed as kernel
from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.words import BLOCK, NUM_WARPS, Inboxes
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted
from tests.runner.tensor_parallel.symmetric_memory.kernels import words_in_interpreter

SIZES = (24, 2048, 4096 + 16, 24, 16, 2048, 3000 * 4)
"""In bytes: sums of one program and of several in turns, so that their counts differ."""

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


part = functools.partial(words_in_interpreter.part, sizes=SIZES, dtypes=DTYPES)


def check_sums() -> None:
    """Add up, scatter and gather 21 times on two ranks, one of them late at times, sums in place and not."""
    torch.set_num_threads(1)  # a forked process has no threads of torch's
    words_in_interpreter.replace_instructions(kernel)
    capacity = 8 * BLOCK
    boxes = torch.zeros(2, 2, 2, capacity, dtype=torch.int64).share_memory_()
    inboxes = torch.tensor([box.data_ptr() for box in boxes])
    child = os.fork()
    if child == 0:
        equal = False
        try:
            equal = has_the_sums(inboxes, capacity, 1)
        finally:
            os._exit(0 if equal else 1)
    equal = has_the_sums(inboxes, capacity, 0)
    _, status = os.waitpid(child, 0)
    assert equal and status == 0


def has_the_sums(inboxes: torch.Tensor, capacity: int, rank: int) -> bool:
    counts, stop = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    boxes = Inboxes(addresses=inboxes, counts=counts, stop=stop, capacity=capacity, rank=rank)
    equal = True
    for number in range(21):
        x = part(number, rank)
        output = x if number % 2 else torch.empty_like(x)
        if number % 4 == 2 * rank:
            time.sleep(0.05)
        parts = [part(number, 0), part(number, 1)]
        kernel.push_and_add_up(x, output, boxes)
        equal &= torch.equal(output, parts[0] + parts[1])
        if number % 3 == 0:  # words of two numbers, so that half of them are whole words
            own = torch.empty(len(x) // 2, dtype=x.dtype)
            kernel.push_and_scatter_sum(parts[rank], own, boxes)
            equal &= torch.equal(own, (parts[0] + parts[1]).view(2, -1)[rank])
        gathered = torch.empty(2, len(x), dtype=x.dtype)
        kernel.push_and_gather(parts[rank], gathered, boxes)
        equal &= torch.equal(gathered, torch.stack(parts))
    return equal


def test_two_ranks_have_the_sum() -> None:
    interpreted(check_sums)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "is_summed", "is_scattered"),
    [*((dtype, True, is_scattered) for dtype in DTYPES for is_scattered in (False, True)), (torch.int32, False, False)],
)
def test_the_kernel_compiles_for_hopper(
    dtype: torch.dtype, is_summed: bool, is_scattered: bool, num_ranks: int
) -> None:
    """A word is sent and received whole, with the scope of several GPUs."""
    x, counts = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    inboxes = torch.zeros(num_ranks, dtype=torch.int64)
    ptx = compile_for_gpu(
        kernel.pushed_kernel,
        {"x": x, "output": x, "inboxes": inboxes, "counts": counts, "stop": counts, "num_words": 2048, "zero": 0}
        | {"CAPACITY": 2**19, "RANK": 1, "RANKS": num_ranks, "IS_SUMMED": is_summed}
        | {"IS_SCATTERED": is_scattered, "BLOCK": BLOCK, "OVERLAP": True},
        {"num_warps": NUM_WARPS, "launch_pdl": True},
    )
    assert ptx.count("st.relaxed.sys.global.b64") == 4 * (num_ranks - 1) == ptx.count("ld.relaxed.sys.global.b64")
