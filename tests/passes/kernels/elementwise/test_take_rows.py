"""The kernel that takes rows gives what indexing gives, bit for bit."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.kernels.elementwise.take_rows import take_rows_kernel, take_rows_on_gpu
from piecegraph.passes.ops.take_rows import take_rows_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.graph_replays import assert_replays_equal
from tests.interpreter import interpreted

Tensor = torch.Tensor


def check(sources: list[Tensor], index: Tensor, dim: int) -> None:
    """A negative number counts from the end; where none is, that makes no difference."""
    found, expected = take_rows_on_gpu(sources, index, dim, True), take_rows_reference(sources, index, dim, True)
    if not (index < 0).any():
        found += take_rows_on_gpu(sources, index, dim, False)
        expected += take_rows_reference(sources, index, dim, False)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous() and one.dtype == other.dtype
        assert torch.equal(one, other)


def check_shapes(device: str = "cpu") -> None:
    """Rows that fill a program and that do not, one source to three, of several dtypes and sizes, with gaps."""
    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=random).mul(50).to(dtype).to(device)

    index = torch.tensor([3, 0, -1, 3, 8, -9], device=device)
    for size in (1, 40, 1024, 2500):
        for dtype in (torch.float32, torch.int64, torch.float16):
            check([tensor(9, size, dtype=dtype)], index, 0)
    one, other = tensor(1, 9, 1200), tensor(1, 9, 4, 96, dtype=torch.bfloat16)
    check([one, other], index, 1)
    check([one, other, tensor(1, 20, 7)], index.int(), 1)
    check([tensor(9, 64)], index.view(2, 3), 0)
    check([one, tensor(1, 9, 33)], index.abs() % 9, 1)
    check([tensor(9, 64)], index[:0], 0)
    check([tensor(9, 300)[:, 100:164], tensor(9, 64, 2)[..., 0]], index, 0)
    check([tensor(9, 64)], torch.stack([index, index], 1)[:, 0], 0)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_shapes)


def check_outside(device: str = "cpu") -> None:
    """Nothing outside is read: what is taken there is NaN, or 0."""
    table = torch.arange(12.0, device=device).view(3, 4)
    (found,) = take_rows_on_gpu([table], torch.tensor([2, 3, -4, 0], device=device), 0, True)
    assert torch.equal(found[[0, 3]], table[[2, 0]]) and found[[1, 2]].isnan().all()
    (whole,) = take_rows_on_gpu([table.long()], torch.tensor([3, 1], device=device), 0, True)
    assert whole.tolist() == [[0, 0, 0, 0], [4, 5, 6, 7]]
    (found,) = take_rows_on_gpu([table], torch.tensor([-1, 2], device=device), 0, False)
    assert found[0].isnan().all() and torch.equal(found[1], table[2])


def test_a_row_out_of_range_is_nan() -> None:
    interpreted(check_outside)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_shapes("cuda")
    check_outside("cuda")


@pytest.mark.gpu
def test_an_embedding_of_many_tokens() -> None:
    table = torch.randn(151_936, 1024, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(151_936, (1, 8192), device="cuda")
    check([table], tokens, 0)


@pytest.mark.gpu
def test_a_chain_in_a_graph_is_what_it_is_outside() -> None:
    """Kernels overlap inside the graph only: what is taken, and by which numbers, comes from the preceding kernel."""
    random = torch.Generator(device="cuda").manual_seed(0)
    one = torch.randn(300, 512, generator=random, device="cuda")
    index = torch.randperm(300, generator=random, device="cuda")

    def chain() -> list[Tensor]:
        found: list[Tensor] = []
        rows, other, order = one, one, index
        for _ in range(8):
            rows, other = take_rows_on_gpu([rows, other], order, 0, True)
            (order,) = (taken[:, 0] for taken in take_rows_on_gpu([order[:, None]], order, 0, True))
            found += [rows, other, order]
        return found

    assert_replays_equal(chain)


@pytest.mark.parametrize("is_of_two", [False, True])
def test_it_compiles_for_a_gpu(is_of_two: bool) -> None:
    table, none = torch.empty(0, dtype=torch.bfloat16), None
    arguments = {
        "result": table, "source": table, "other_result": table if is_of_two else none,
        "other": table if is_of_two else none, "numbers": torch.empty(0, dtype=torch.int64), "num_rows": 300,
        "other_num_rows": 300, "row_stride": 1024, "other_row_stride": 2048, "SIZE": 1024, "OTHER_SIZE": 2048,
        "BLOCK": 1024, "WRAPS": True, "OVERLAP": True,
    }  # fmt: skip
    ptx = compile_for_gpu(take_rows_kernel, arguments, {"num_warps": 4, "launch_pdl": True})
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
    assert "ld.global.v4" in ptx, "16 bytes at once"
