"""Kernels of ours on a GPU: what was loaded from the cache computes what was compiled, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piecegraph.compiler.own_kernels.registry import OwnKernels
from piecegraph.passes.kernels.common import own_kernel
from piecegraph.passes.kernels.common.own_kernel import compile_with
from piecegraph.passes.ops.act_mul import ACT_MUL
from piecegraph.passes.ops.linear import LINEAR
from tests.compiler.own_kernels.kernel_caches import OF, cache_in

pytestmark = pytest.mark.gpu

SIZE = 512


def forget_compiled() -> None:
    """As in a new process."""
    from piecegraph.passes.kernels.elementwise import act_mul
    from piecegraph.passes.kernels.linear import linear, sliced_linear, streamed_linear

    act_mul._act_mul.device_caches.clear()
    for kernel in (linear._matvec, linear._matmul, sliced_linear._sliced, streamed_linear._streamed):
        kernel._compiled.clear()
        kernel.kernel.device_caches.clear()


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    before = own_kernel._Choice.compile
    forget_compiled()
    yield
    forget_compiled()
    compile_with(before)


def computed() -> list[torch.Tensor]:
    """By a kernel that Triton launches, and by two that are launched without it, outside a graph and one inside."""
    torch.manual_seed(0)
    x = torch.randn(2, SIZE, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    results = [ACT_MUL(x, "silu"), LINEAR(x, weight, None, ""), LINEAR(x, weight, None, "silu")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = LINEAR(x, weight, None, "")
    graph.replay()
    torch.cuda.synchronize()
    return [*results, inside]


def test_a_loaded_kernel_computes_the_same_bits(tmp_path: Path) -> None:
    """Triton's own cache holds none of our kernels."""
    device = torch.device("cuda", torch.cuda.current_device())
    own = OwnKernels()
    cold = own.begin(cache_in(tmp_path), OF, device)
    assert cold is not None
    wanted = computed()
    assert cold.compiled >= 3
    assert cold.loaded == 0
    assert own.save() == ""

    forget_compiled()
    warm = OwnKernels().begin(cache_in(tmp_path), OF, device)
    assert warm is not None
    found = computed()
    assert (warm.loaded, warm.compiled) == (cold.compiled, 0)
    assert all(map(torch.equal, found, wanted))
    assert not list((tmp_path / "triton").rglob("*.cubin"))
