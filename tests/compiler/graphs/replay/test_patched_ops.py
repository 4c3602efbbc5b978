"""Split ops whose kernels are changed inside a graph: one graph a bucket, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.graphs.replay.prepared_ops import Patch
from tests.compiler.graphs.replay.test_prepared_ops import DESCRIPTORS, NUM_LAYERS, OP, compiled_decoder, make_inputs
from tests.compiler.toy import batch


class Scaled:
    """An attention that multiplies its result by the step's metadata, as a launch that can be patched."""

    def __init__(self, reason: str | None = None) -> None:
        self.step = 1
        self.reason = reason
        self.ran: list[int] = []

    def prepare(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str
    ) -> Any:
        owner = self

        class Launch:
            def __call__(self, step: int) -> None:
                owner.ran.append(step)
                out.copy_(torch.softmax(query @ key.T, dim=-1) @ value * step)

            def unpatchable_reason(self) -> str | None:
                return owner.reason

            def record(self, step: int) -> Patch:
                raise AssertionError("only a CUDA graph is patched")

        return Launch()

    def metadata(self) -> int:
        return self.step


def test_a_bucket_of_patched_ops_is_one_graph() -> None:
    """Each replay runs over its own metadata, and equals the bucket that launches between graphs."""
    compiled = compiled_decoder()
    patched, between = Scaled(), Scaled(reason="the driver is too old")
    with pg.register_prepare(OP, patched.prepare, patched.metadata):
        one = compiled.capture(DESCRIPTORS, make_inputs, mode="PIECEWISE")
    with pg.register_prepare(OP, between.prepare, between.metadata):
        several = compiled.capture(DESCRIPTORS, make_inputs, mode="PIECEWISE")
    assert one.costs(DESCRIPTORS[0]) == {"graph": 1, "patch": NUM_LAYERS}
    assert several.costs(DESCRIPTORS[0]) == {"graph": NUM_LAYERS + 1, "launch": NUM_LAYERS}
    results = []
    for step in (1, 2, 5):
        patched.step = between.step = step
        patched.ran.clear()
        for descriptor in DESCRIPTORS:
            inputs = batch(descriptor.num_tokens, 2, seed=step)
            results.append(one.replay(descriptor, *inputs).clone())
            assert torch.equal(results[-1], several.replay(descriptor, *inputs))
        assert patched.ran == [step] * NUM_LAYERS * len(DESCRIPTORS)
    assert not torch.equal(results[1], results[3])


def make_inputs_on_gpu(descriptor: pg.BatchDescriptor) -> Sequence[torch.Tensor]:
    return [tensor.cuda() for tensor in make_inputs(descriptor)]


def check_driver() -> None:
    """A node of a graph becomes the same kernel over other numbers, is switched off and on again."""
    import triton
    import triton.language as tl

    from piecegraph.compiler.common.cuda_driver import last_captured_node, set_enabled
    from piecegraph.runner.attention.triton.kernels.launch import KernelCall, KernelPreparer

    @triton.jit(do_not_specialize=["count", "amount"])  # type: ignore[untyped-decorator,unused-ignore]
    def add(target, count, amount, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(target + at, tl.load(target + at, mask=at < count) + amount, mask=at < count)

    target = torch.zeros(1000, dtype=torch.int32, device="cuda")
    call = KernelCall(add, (1, 1, 1), {"target": target, "count": 3, "amount": 1, "block": 128}, {"num_warps": 4})
    kernel = KernelPreparer().prepare(call, ("count", "amount"))
    assert kernel.unpatchable_reason is None
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch((1, 1, 1), stream, 3, 1)
        node = last_captured_node(stream)
    graph.instantiate()
    handle: int = graph.raw_cuda_graph_exec()  # type: ignore[attr-defined,unused-ignore]
    graph.replay()
    assert target.sum().item() == 3
    kernel.patch(handle, node, (8, 1, 1), 900, 2)
    graph.replay()
    assert target.sum().item() == 3 + 1800
    set_enabled(handle, node, False)
    graph.replay()
    assert target.sum().item() == 3 + 1800
    set_enabled(handle, node, True)
    graph.replay()
    assert target.sum().item() == 3 + 3600


@pytest.mark.gpu
def test_a_node_of_a_cuda_graph_is_changed() -> None:
    check_driver()
