"""Sums with the norm behind them: two ranks in Triton's interpreter, inboxes in shared memory; compiled for sm_90."""

from __future__ import annotations

import os
import time

import pytest
import torch

from piecegraph.passes.ops.rms_norm import add_rms_norm
from piecegraph.runner.tensor_parallel.symmetric_memory.kernels import pushed, pushed_norm
from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.words import BLOCK, Inboxes
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted
from tests.runner.tensor_parallel.symmetric_memory.kernels import words_in_interpreter

SHAPES = ((1, 2 * BLOCK), (3, 2 * BLOCK + 60), (2, 64), (1, 4 * BLOCK), (5, 30))
"""Rows of whole blocks of an inbox and others, in turns, so that counts differ."""


def check_sums() -> None:
    """Add up and norm 25 times on two ranks, one of them late at times, with sums of other programs in between."""
    torch.set_num_threads(1)  # a forked process has no threads of torch's
    for kernel in (pushed, pushed_norm):
        words_in_interpreter.replace_instructions(kernel)
    capacity = 8 * BLOCK
    boxes = torch.zeros(2, 2, 2, capacity, dtype=torch.int64).share_memory_()
    addresses = [box.data_ptr() for box in boxes]
    child = os.fork()
    if child == 0:
        equal = False
        try:
            equal = has_the_norms(addresses, capacity, 1)
        finally:
            os._exit(0 if equal else 1)
    equal = has_the_norms(addresses, capacity, 0)
    _, status = os.waitpid(child, 0)
    assert equal and status == 0


def has_the_norms(addresses: list[int], capacity: int, rank: int) -> bool:
    boxes = Inboxes.of(addresses, capacity, rank, torch.zeros(1, dtype=torch.int32), torch.device("cpu"))
    equal = True
    for number in range(25):
        shape = SHAPES[number % len(SHAPES)]
        drawn = torch.randn(4, *shape, generator=torch.Generator().manual_seed(number)).half()
        *parts, residual, weights = drawn
        weight, offset = (None, 0.0) if number % 3 == 0 else (weights[0].contiguous(), number % 2 * 1.0)
        if number % 4 == 2 * rank:
            time.sleep(0.05)
        normed, total = pushed_norm.push_and_norm(parts[rank], residual, weight, 1e-5, offset, boxes)
        wanted, wanted_total = add_rms_norm(parts[0] + parts[1], residual, weight, 1e-5, offset)
        equal &= torch.equal(total, wanted_total) and torch.allclose(normed, wanted, rtol=2e-3, atol=1e-6)
        if number % 2:
            output = torch.empty_like(parts[rank])
            pushed.push_and_add_up(parts[rank], output, boxes)
            equal &= torch.equal(output, parts[0] + parts[1])
    return equal


def test_two_ranks_have_the_norm_of_the_sum() -> None:
    interpreted(check_sums)


def test_which_rows_it_takes() -> None:
    sizes = [size for size in (0, 1, 2, 63, 64, 4096, 16384, 16386) if pushed_norm.can_norm(size, torch.bfloat16)]
    assert sizes == [2, 64, 4096, 16384] and not pushed_norm.can_norm(4096, torch.float32)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("size", [896, 4096, 8192, 16384])
@pytest.mark.parametrize("dtype", pushed_norm.DTYPES)
def test_the_kernel_compiles_for_hopper(dtype: torch.dtype, size: int, num_ranks: int) -> None:
    """A word is sent and received whole, with the scope of several GPUs."""
    x, counts = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    columns = 1 << (size // 2 - 1).bit_length()
    warps = min(columns // 128, pushed_norm.MAX_WARPS)
    ptx = compile_for_gpu(
        pushed_norm.pushed_norm_kernel,
        {"x": x, "residual": x, "weight": x, "result": x, "total": x}
        | {"inboxes": torch.zeros(num_ranks, dtype=torch.int64), "counts": counts, "stop": counts}
        | {"eps": 1e-6, "offset": 0.0, "zero": 0, "WORDS": size // 2, "COLUMNS": columns, "CAPACITY": 2**19}
        | {"RANK": 1, "RANKS": num_ranks, "BLOCK": BLOCK, "OVERLAP": True},
        {"num_warps": warps, "launch_pdl": True},
    )
    a_thread = columns // (32 * warps)
    sent = ptx.count("st.relaxed.sys.global.b64")
    assert sent == a_thread * (num_ranks - 1) == ptx.count("ld.relaxed.sys.global.b64")
