"""Into how many parts sums are split: enough programs for every multiprocessor, and parts worth their bytes."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.quantised import split_sums
from piecegraph.passes.kernels.quantised.split_sums import num_parts
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted


@pytest.mark.parametrize(
    ("columns", "size", "num_rows", "parts"),
    [
        (4096, 4096, 1, 4),  # 64 programs of 4 warps, of which 132 multiprocessors want 264
        (28672, 4096, 1, 1),  # programs enough
        (4096, 14336, 16, 4),
        (4096, 4096, 128, 2),  # more parts would write and read more bytes than weights have
        (4096, 512, 1, 1),  # sums too short
    ],
)
def test_parts_of_linears_with_four_bits(columns: int, size: int, num_rows: int, parts: int) -> None:
    found = num_parts(
        columns // 64,
        size // 128,
        num_warps=4,
        part_bytes=num_rows * columns * 4,
        weight_bytes=columns * size // 2,
        sms=132,
    )
    assert found == parts


def check_parts() -> None:
    """Integers are added exactly; scales of columns and rows, and a bias, come after."""
    parts = torch.randint(-(2**29), 2**29, (3, 2, 300), dtype=torch.int32)
    scale, step, bias = torch.rand(150, 1), torch.rand(2, 1), torch.randn(300)
    out = torch.empty(2, 300)
    split_sums.add_parts_on_gpu(parts, out)
    assert torch.equal(out, parts.sum(0, dtype=torch.int32).float())
    split_sums.add_parts_on_gpu(parts.float(), out, scale=scale, block_rows=2, step=step, bias=bias)
    wanted = parts.double().sum(0) * scale[:, 0].repeat_interleave(2).double() * step.double() + bias.double()
    assert (out - wanted).abs().amax() <= 1e-6 * wanted.abs().amax()


def test_the_interpreted_kernel_adds_them() -> None:
    interpreted(check_parts)


def test_it_compiles_for_hopper() -> None:
    floats = torch.empty(0)
    arguments = {
        "parts": floats, "scale": None, "step": None, "bias": None, "out": torch.empty(0, dtype=torch.bfloat16),
        "num_rows": 3, "num_columns": 4096, "num_parts": 4, "BLOCK_ROWS": 1, "BLOCK": 256, "OVERLAP": True,
    }  # fmt: skip
    assert "st.global" in compile_for_gpu(split_sums.add_parts_kernel, arguments, {"num_warps": 2})
