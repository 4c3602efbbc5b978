"""The options `min_p`, `top_k` and `top_p` on a CPU by a kernel in C++, which does not sort a row."""

from __future__ import annotations

from pathlib import Path

import torch

from piecegraph.passes.kernels.common.cpp_kernel import INT, NUMBER, POINTER, CppKernel

KERNEL = CppKernel(
    Path(__file__).with_name("cpu_truncate.cpp"),
    "piecegraph_truncate",
    [*[POINTER] * 5, NUMBER, NUMBER, NUMBER, INT],
)


def truncate_on_cpu(
    logits: torch.Tensor,
    selected: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    table: torch.Tensor,
) -> bool:
    """Mask `logits` as `truncate_reference` does, unless the kernel cannot; return whether it did.

    Probabilities are added up in float64, where the reference does it in float32: the tokens at which `top_p` is just
    reached may differ by one.
    """
    if KERNEL.call is None or logits.dtype is not torch.float32 or not logits.is_contiguous():
        return False
    selected, idx_mapping, table = selected.contiguous(), idx_mapping.contiguous(), table.contiguous()
    temperature = temperature.contiguous()
    assert selected.dtype is idx_mapping.dtype is table.dtype is torch.int32, "as the kernel reads them"
    assert temperature.dtype is torch.float32, "as the kernel reads it"
    failed = KERNEL.call(
        logits.data_ptr(), selected.data_ptr(), idx_mapping.data_ptr(), temperature.data_ptr(), table.data_ptr(),
        table.shape[1], len(selected), logits.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the options of {len(selected)} rows of {logits.shape[1]} logits")
    return True
