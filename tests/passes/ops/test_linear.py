"""`piecegraph::linear`: what it computes, that it rounds no worse than a linear and its activation, and its shape."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.linear.linear_config import MATVEC_ROWS, SlicedConfig, linear_config
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig
from piecegraph.passes.ops.linear import LINEAR
from tests.gpus import H200
from tests.passes.relative_error import Tensors, assert_no_less_exact, quick_and_all

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 2, 3, 5, 16, 33, 64, 65, 130)
WEIGHTS = [
    (32, 64), (32, 128), (32, 192), (32, 320), (64, 64), (64, 128), (96, 128), (128, 64),
    (48, 64),  # the kernels take its 48 columns, and not its 24 gated ones
    (40, 64), (36, 96), (64, 100),
]  # fmt: skip
"""Its rows, and their size; those of the last line are the library's whatever the rows of x."""

SHAPES = [(rows, *weight) for rows in ROWS for weight in WEIGHTS]
WIDE = [(rows, 4096, 64) for rows in (1, 3, 17, 64, 65, 130)]
"""Other blocks of columns, and with many rows the library's again."""

LONG = [(1, 64, 2048), (1, 32, 4096)]
LARGE = [(1, 4096, 4096), (1, 16384, 1024), (1, 17408, 2048)]
"""Weights of several waves of programs."""

MIDDLE = [(rows, columns, size) for rows in range(2, 9) for columns, size in ((64, 512), (1024, 1024), (4096, 1536))]
MIDDLE += [(8, 4096, 4096), (5, 6144, 4096), (31, 6144, 4096), (17, 4096, 2304)]
"""Larger weights, not gated, and small ones in several tiles."""

SLICED = [
    (rows, *weight)
    for rows in (2, 8, 13, 16)
    for weight in ((32, 256), (64, 768), (32, 1024), (64, 2048), (32, 5120), (1024, 1024), (2048, 1024), (4096, 1024))
]  # fmt: skip
"""Two to 16 rows of whole tiles: all block sizes, one tile and many, held or not."""

STREAMED = [(rows, 8448, 1024) for rows in (2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 48, 64)]
STREAMED += [(rows, columns, size) for rows in (9, 13, 16) for columns in (4480, 6144) for size in (512, 768, 1024)]
STREAMED += [(rows, 17408, 2048) for rows in (16, 32, 33, 64)] + [(rows, 27136, 1280) for rows in (2, 8)]
"""Gated: large weights, and smaller ones."""

WAVES = [(rows, *weight) for rows in (33, 50, 64, 70, 128) for weight in ((6144, 4096), (6160, 4096), (28672, 2048))]
"""Dozens of rows of weights that are one wave of programs, without an activation or with one."""


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    rows, columns, size = shape
    x, weight = torch.randn(rows, size, generator=random), torch.randn(columns, size, generator=random)
    return x, weight / size**0.5, torch.randn(columns, generator=random)


def fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    return (
        LINEAR(x, weight, None, ""),
        LINEAR(x, weight, bias, ""),
        LINEAR(x, weight, None, "silu"),
        LINEAR(x, weight, bias, "gelu"),
    )


def unfused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """The gated ones as transformers' Phi3MLP spells them."""
    plain, biased = F.linear(x, weight), F.linear(x, weight, bias)
    (gate, up), (biased_gate, biased_up) = plain.chunk(2, -1), biased.chunk(2, -1)
    return plain, biased, F.silu(gate) * up, F.gelu(biased_gate) * biased_up


def check_against_torch(shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype, device: str) -> None:
    """Where the library multiplies, only the activation's roundings differ: 0.88 of the unfused error, with a standard
    deviation of 0.05 over as many numbers."""
    assert_no_less_exact(fused, unfused, unfused, make_inputs, shapes, dtype, device, min_numbers=4096)


@pytest.mark.parametrize("shapes", quick_and_all(SHAPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_no_less_exact_than_torch(dtype: torch.dtype, shapes: list[tuple[int, int, int]]) -> None:
    check_against_torch(shapes, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_are_no_less_exact_than_torch(dtype: torch.dtype) -> None:
    check_against_torch([*SHAPES, *WIDE, *LONG, *LARGE, *MIDDLE, *SLICED, *STREAMED, *WAVES], dtype, "cuda")


def test_those_shapes_take_every_kernel_and_the_library() -> None:
    """The shapes of the tests before cover every kernel and the library: on an H200, with an activation and without."""
    taken = {"matvec": 0, "sliced": 0, "streamed": 0, "matmul": 0, "library": 0}
    block_ns: set[tuple[object, int]] = set()
    for rows, columns, size in [*SHAPES, *WIDE, *LONG, *LARGE, *MIDDLE, *SLICED, *STREAMED, *WAVES]:
        for is_gated in (False, True):
            config = linear_config(rows, columns // (1 + is_gated), size, is_gated=is_gated, itemsize=2, gpu=H200)
            if config is None:
                taken["library"] += 1
            elif isinstance(config, SlicedConfig):
                taken["sliced"] += 1
                block_ns.add(("sliced", config.block_n))
            elif isinstance(config, StreamedConfig):
                taken["streamed"] += 1
                block_ns.add(("streamed", config.block_m))
            else:
                taken["matvec" if rows <= MATVEC_ROWS else "matmul"] += 1
                block_ns.add((config.block_m, config.block_n))
    assert min(taken.values()) >= 30, taken
    sliced = {("sliced", block_n) for block_n in (8, 16, 32)}
    streamed = {("streamed", block_m) for block_m in (8, 16, 32, 64)}
    blocks = {(0, 1), (0, 2), (0, 4), (0, 8), (64, 16), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128)}
    assert block_ns == blocks | sliced | streamed


@pytest.mark.parametrize("bias", [True, False])
def test_without_an_activation_it_is_torchs_linear(bias: bool) -> None:
    layer = torch.nn.Linear(8, 6, bias=bias)
    x = torch.randn(2, 3, 8)
    assert torch.equal(LINEAR(x, layer.weight, layer.bias, ""), layer(x))


def test_an_activation_joins_the_halves() -> None:
    x, weight = torch.randn(3, 8), torch.randn(12, 8)
    gate, up = F.linear(x, weight).chunk(2, -1)
    torch.testing.assert_close(LINEAR(x, weight, None, "silu"), F.silu(gate) * up)


def test_its_shape_is_known_without_running_it() -> None:
    torch.library.opcheck(LINEAR, (torch.randn(2, 3, 8), torch.randn(12, 8), torch.randn(12), "gelu"))
    torch.library.opcheck(LINEAR, (torch.randn(5, 8), torch.randn(12, 8), None, ""))
