"""The kernel of rotary tables gives what its reference gives, and float64 closely, however far a position is."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.elementwise.rotary_tables import rotary_tables_kernel, rotary_tables_on_gpu
from piecegraph.passes.ops.rotary_tables import rotary_tables_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.graph_replays import assert_replays_equal
from tests.interpreter import interpreted

TOLERANCE = 4e-7
"""Of a cosine: it and its scaling are right to two units of the last place."""

DIMS = (2, 32, 64, 80, 96, 128, 256, 1024)


def check(num_tokens: int, dim: int, scaling: float, device: str) -> None:
    random = torch.Generator().manual_seed(num_tokens + dim)
    positions = torch.randint(1_000_001, (num_tokens,), generator=random)
    positions[:2] = torch.tensor([1_000_000, 0])[:num_tokens]
    positions, inv_freq = positions.to(device), (10_000.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
    found = rotary_tables_on_gpu(positions, inv_freq, scaling)
    angles = (positions[:, None].float() * inv_freq).double().repeat(1, 2)
    for table, reference, exact in zip(
        found, rotary_tables_reference(positions, inv_freq, scaling), (angles.cos(), angles.sin()), strict=True
    ):
        assert table.is_contiguous() and table.shape == (num_tokens, dim)
        torch.testing.assert_close(table, reference, rtol=0, atol=TOLERANCE * scaling)
        torch.testing.assert_close(table.double(), exact * scaling, rtol=0, atol=TOLERANCE * scaling)


def check_shapes(device: str = "cpu") -> None:
    """Blocks that fit and that do not, halves that are no power of two, no tokens, positions with gaps."""
    for num_tokens in (0, 1, 7, 300):
        for dim in DIMS:
            check(num_tokens, dim, 1.0 if dim % 64 else 1.25, device)
    positions, inv_freq = torch.arange(10, device=device), torch.rand(32, device=device)
    for table, dense in zip(
        rotary_tables_on_gpu(positions[::3], inv_freq[::2], 1.0),
        rotary_tables_on_gpu(positions[::3].clone(), inv_freq[::2].clone(), 1.0),
        strict=True,
    ):
        assert torch.equal(table, dense)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_shapes)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_shapes("cuda")


@pytest.mark.gpu
def test_many_tokens_on_the_gpu() -> None:
    check(8192, 128, 1.0, "cuda")
    check(100_001, 96, 1.5, "cuda")


@pytest.mark.gpu
def test_a_chain_in_a_graph_is_what_it_is_outside() -> None:
    """Kernels overlap inside the graph only: positions come from the preceding kernel."""
    positions, inv_freq = torch.arange(300, device="cuda"), torch.rand(64, device="cuda")

    def chain() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        moved = positions
        for _ in range(8):
            cos, sin = rotary_tables_on_gpu(moved, inv_freq, 1.0)
            moved = (cos[:, 0] * 1000).to(torch.int64).abs()
            found += [cos, sin]
        return found

    assert_replays_equal(chain)


@pytest.mark.parametrize("half", [16, 48, 128])
def test_it_compiles_for_a_gpu_and_takes_no_approximations(half: int) -> None:
    """`cos.approx` is right for small angles alone."""
    table = torch.empty(0)
    arguments = {
        "cos": table, "sin": table, "positions": torch.empty(0, dtype=torch.int64), "inv_freq": table,
        "num_tokens": 300, "scaling": 1.0, "HALF": half, "ROWS": 2, "COLUMNS": 128, "OVERLAP": True,
    }  # fmt: skip
    ptx = compile_for_gpu(rotary_tables_kernel, arguments, {"num_warps": 4, "launch_pdl": True})
    assert "approx" not in ptx
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
