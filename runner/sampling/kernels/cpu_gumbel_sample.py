"""The draw of `gumbel_sample` on a CPU, and the record of its tokens, by a kernel in C++."""

from __future__ import annotations

from pathlib import Path

import torch

from piecegraph.passes.kernels.common.cpp_kernel import INT, NUMBER, POINTER, CppKernel
from piecegraph.runner.common.token_record import TokenRecord

KERNEL = CppKernel(
    Path(__file__).with_name("cpu_gumbel_sample.cpp"),
    "piecegraph_gumbel_sample",
    [INT, POINTER, NUMBER, *[POINTER] * 5, NUMBER, NUMBER, POINTER, NUMBER, NUMBER, POINTER, POINTER, INT],
)

DTYPES = (torch.float32, torch.bfloat16)


def gumbel_sample_on_cpu(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    record: TokenRecord | None = None,
) -> bool:
    """Draw as `runner.sampling.gumbel_sample` does, unless the kernel cannot; return whether it did.

    Writes `out` and `record`. Logits need one of `DTYPES` and contiguous rows. The noise differs from the reference's
    in its last bits.
    """
    if KERNEL.call is None or logits.dtype not in DTYPES or logits.stride(1) != 1 or not out.is_contiguous():
        return False
    idx_mapping, positions = idx_mapping.contiguous(), positions.contiguous()
    temperature, seeds = temperature.contiguous(), seeds.contiguous()
    assert idx_mapping.dtype is positions.dtype is torch.int32, "as the kernel reads them"
    assert temperature.dtype is torch.float32 and seeds.dtype is out.dtype is torch.int64, "as the kernel reads them"
    KERNEL.call(
        logits.dtype is torch.bfloat16, logits.data_ptr(), logits.stride(0), idx_mapping.data_ptr(),
        temperature.data_ptr(), seeds.data_ptr(), positions.data_ptr(), out.data_ptr(), *logits.shape,
        *_written(record), torch.get_num_threads(),
    )  # fmt: skip
    return True


def _written(record: TokenRecord | None) -> tuple[int | None, ...]:
    """Return the arguments for the states to which tokens are added."""
    if record is None:
        return None, 0, 0, None, None
    token_ids, prefill_lens, num_computed_tokens = record
    assert token_ids.dtype is prefill_lens.dtype is num_computed_tokens.dtype is torch.int32, "as the kernel reads them"
    assert token_ids.stride(1) == 1 and prefill_lens.is_contiguous() and num_computed_tokens.is_contiguous()
    return (
        token_ids.data_ptr(), token_ids.stride(0), token_ids.shape[1], prefill_lens.data_ptr(),
        num_computed_tokens.data_ptr(),
    )  # fmt: skip
