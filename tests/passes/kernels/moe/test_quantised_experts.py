"""Experts with quantised weights: in Triton's interpreter, compiled for sm_90, and at real sizes on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from piecegraph.passes.kernels.moe import quantised_experts as kernels
from piecegraph.passes.ops.quantised.experts import QUANTISED_EXPERTS, quantised_experts_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.gpus import H200
from tests.interpreter import interpreted
from tests.passes.kernels.quantised.quantised_inputs import relative_rms
from tests.passes.ops.quantised.expert_inputs import CLAMPED, SCHEMES, SILU, exact, expert_inputs

BOUND = {torch.float16: 2e-3, torch.float32: 1e-5}
"""Relative root mean square error to float64: weights, the inner activation and sums are rounded to the dtype."""


def check_every_scheme() -> None:
    """Experts of no token, ids of other ranks' experts, and a row of NaN that spoils no other."""
    for scheme in SCHEMES:
        dtype = torch.float16 if scheme in ("int8", "mxfp4") else torch.float32
        given = expert_inputs(scheme, num_tokens=3, gate=CLAMPED, dtype=dtype)
        x = given.x.clone()
        x[-1] = float("nan")
        found = kernels.quantised_experts_on_gpu(*replace(given, x=x).kernel_operands)
        assert found is not None and found.dtype is dtype
        assert relative_rms(found[:-1], exact(given)[:-1]) < BOUND[dtype], scheme


def check_sizes_that_no_tile_divides() -> None:
    """Also without biases, and with gate and up in halves."""
    given = expert_inputs("mxfp4", num_tokens=2, hidden=96, size=32, gate=SILU, has_bias=False)
    found = kernels.quantised_experts_on_gpu(*given.kernel_operands)
    assert found is not None
    assert relative_rms(found, exact(given)) < 1e-5


def check_rounded_inputs() -> None:
    for scheme, inputs in (("int8", "tokens"), ("e4m3", "tokens"), ("e4m3 in blocks", "groups")):
        given = expert_inputs(scheme, num_tokens=2, inputs=inputs)
        found = kernels.quantised_experts_on_gpu(*given.kernel_operands)
        assert found is not None
        assert relative_rms(found, exact(given)) < 1e-2, scheme


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check_every_scheme, marks=pytest.mark.slow),
        check_sizes_that_no_tile_divides,
        pytest.param(check_rounded_inputs, marks=pytest.mark.slow),
    ],
)
def test_the_interpreted_kernels_equal_float64(check: Any) -> None:
    interpreted(check)


def constants(scheme: str, which: int, num_pairs: int = 4096) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a kernel at the sizes of gpt-oss-20b, and how it runs."""
    given = expert_inputs(scheme, num_experts=2, hidden=2880, size=2880, dtype=torch.bfloat16, gate=CLAMPED)
    stored = (given.gate_up, given.down)
    layouts = tuple(kernels.layout_of(each) for each in stored)
    tiles = kernels.pick_expert_tiles(num_pairs, 32, layouts, 2, H200.shared_bytes)[which]
    made = kernels._constants(stored[which], layouts[which], tiles)
    scale = kernels._scales(stored[which])
    floats, integers = torch.empty(0, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32)
    tensors = {
        "sorted_pairs": integers,
        "block_expert": integers,
        "scale": scale,
        "bias": floats,
        "num_pairs": num_pairs,
    }
    return {**tensors, **made, "OVERLAP": True}, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def compiled(kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> str:
    """The arguments in the kernel's order."""
    return compile_for_gpu(kernel, {name: arguments[name] for name in kernel.arg_names}, options)


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    """With tensor cores, and in the memory of a program. The other schemes share what `weights_only` compiles."""
    floats = torch.empty(0, dtype=torch.bfloat16)
    given = expert_inputs("mxfp4", dtype=torch.bfloat16)
    arguments, options = constants("mxfp4", 0)
    gate = {"TOP_K": 4, "ACTIVATION": CLAMPED.activation, "IS_INTERLEAVED": True, "ALPHA": 1.702, "LIMIT": 7.0}
    tensors = {"x": floats, "gate_up": given.gate_up.values, "inner": floats, "size": 2880}
    assert "mma" in compiled(kernels.experts_gate_up_kernel, {**arguments, **tensors, **gate}, options)
    arguments, options = constants("mxfp4", 1)
    tensors = {"inner": floats, "down": given.down.values, "results": torch.empty(0), "hidden": 2880}
    tensors["topk_weights"] = torch.empty(0)
    assert "mma" in compiled(kernels.experts_down_kernel, {**arguments, **tensors}, options)


GPT_OSS: dict[str, Any] = {"num_experts": 32, "hidden": 2880, "size": 2880}
QWEN3: dict[str, Any] = {"num_experts": 128, "hidden": 2048, "size": 768}


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernels_equal_the_reference_at_sizes_of_real_models(scheme: str) -> None:
    """Also inside a CUDA graph, bit by bit, with other choices of experts at a replay."""
    for sizes in (GPT_OSS, QWEN3):
        for num_tokens in (1, 2, 8, 64, 300):
            on_cpu = expert_inputs(scheme, num_tokens=num_tokens, **sizes, dtype=torch.bfloat16, gate=CLAMPED)
            given = on_cpu.cuda()
            found = QUANTISED_EXPERTS(*given.args)
            assert relative_rms(found, quantised_experts_reference(*given.operands)) < 1e-2, (sizes, num_tokens)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = QUANTISED_EXPERTS(*given.args)
            given.topk_ids.copy_(given.topk_ids.flip(0))
            graph.replay()
            assert torch.equal(again, QUANTISED_EXPERTS(*given.args)), (sizes, num_tokens)
