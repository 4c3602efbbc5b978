"""The kernels of routed experts: interpreted on a CPU against float64, at real sizes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from piecegraph.passes.kernels.moe.config import MoeConfig, Tile
from piecegraph.passes.ops.moe.experts import MOE_EXPERTS, moe_experts_reference
from tests.interpreter import interpreted
from tests.passes.moe_inputs import MoeInputs, exact, moe_inputs, relative_rms, unfused

SMALL = Tile(block_n=16, block_k=16, num_warps=4, num_stages=2)
MATVEC = MoeConfig(block_m=1, gate_up=SMALL, down=SMALL)
GROUPED = MoeConfig(block_m=16, gate_up=SMALL, down=SMALL)
OF_PROMPTS = replace(GROUPED, block_m=64)

# num_tokens, top_k, num_experts, hidden, size: multiples of no block; one expert; all of them chosen
SIZES = [(1, 2, 4, 48, 24), (5, 3, 6, 40, 20), (3, 1, 1, 16, 16), (2, 4, 4, 33, 17), (20, 2, 4, 32, 16)]

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative root mean square error; the rounding of the inner activation and of the result are half of it."""


def check_both_ways_of_computing() -> None:
    """Whatever the layout, and whichever experts got no token."""
    from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

    for dtype in (torch.float32, torch.float16):
        for seed, sizes in enumerate(SIZES):
            for activation in ("silu", "gelu", "gelu_tanh") if seed == 1 else ("silu",):
                among = range(sizes[1]) if seed == 4 else None
                inputs = moe_inputs(*sizes, dtype=dtype, seed=seed, activation=activation, among=among)
                for config in (MATVEC, GROUPED, OF_PROMPTS, None)[: 4 if seed < 3 else 3]:
                    found = moe_experts_on_gpu(*inputs.args, config=config)
                    assert found.dtype == dtype and found.shape == inputs.x.shape
                    error = relative_rms(found, exact(inputs))
                    assert error < TOLERANCE[dtype], (sizes, activation, config, error)


def check_layouts_of_operands() -> None:
    """Weights stored transposed or padded, rows of a larger tensor, ids and weights of other strides and dtypes."""
    from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

    inputs = moe_inputs(5, 2, 4, 48, 24)
    strided = replace(
        inputs,
        x=torch.cat([inputs.x, torch.full_like(inputs.x, float("nan"))], 1)[:, :48],
        topk_weights=inputs.topk_weights.t().contiguous().t(),
        topk_ids=inputs.topk_ids.int().t().contiguous().t(),
        gate_up=inputs.gate_up.transpose(1, 2).contiguous().transpose(1, 2),
        down=torch.cat([inputs.down, inputs.down], 2)[..., :24],
    )
    for config in (MATVEC, GROUPED):
        found, wanted = (moe_experts_on_gpu(*each.args, config=config) for each in (strided, inputs))
        assert torch.equal(found, wanted)


def check_experts_elsewhere_count_for_nothing() -> None:
    """A rank with experts 2 and 3 of six computes their part, however experts elsewhere are numbered and weighed."""
    from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

    inputs = moe_inputs(12, 3, 6, 48, 24)
    is_here = (inputs.topk_ids >= 2) & (inputs.topk_ids < 4)
    assert (~is_here).all(1).any()  # a token has no expert here
    weights = inputs.topk_weights.masked_fill(~is_here, 0.0)
    wanted = exact(replace(inputs, topk_weights=weights))
    poisoned = inputs.topk_weights.masked_fill(~is_here, float("nan"))
    for elsewhere in (inputs.topk_ids - 2, torch.where(is_here, inputs.topk_ids - 2, 2)):
        own = replace(inputs, topk_ids=elsewhere, topk_weights=poisoned)
        part = replace(own, gate_up=inputs.gate_up[2:4], down=inputs.down[2:4])
        for config in (MATVEC, GROUPED, OF_PROMPTS):
            torch.use_deterministic_algorithms(True)  # fills new memory with NaN
            try:
                found = moe_experts_on_gpu(*part.args, num_all_experts=6, config=config)
            finally:
                torch.use_deterministic_algorithms(False)
            assert relative_rms(found, wanted) < TOLERANCE[torch.float32]
        assert relative_rms(moe_experts_reference(*part.args), wanted) < TOLERANCE[torch.float32]


def check_results_that_cancel() -> None:
    """Results of 81,920 and -79,872, which float16 has not, add up to 2,048 in every layout."""
    from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

    x = torch.ones(70, 16, dtype=torch.float16)
    gate_up = torch.ones(2, 32, 16, dtype=torch.float16)
    down = torch.full((2, 16, 16), 20.0, dtype=torch.float16)
    down[1] = -19.5
    choice = torch.ones(70, 2), torch.tensor([[0, 1]]).repeat(70, 1)
    for config in (MATVEC, GROUPED, OF_PROMPTS, None):
        found = moe_experts_on_gpu(x, *choice, gate_up, down, "silu", config=config)
        assert torch.equal(found, torch.full_like(x, 2048.0)), config


def check_a_rank_without_experts() -> None:
    from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

    inputs = moe_inputs(20, 2, 4, 32, 16)
    part = replace(inputs, gate_up=inputs.gate_up[:0], down=inputs.down[:0])
    assert torch.equal(moe_experts_on_gpu(*part.args, num_all_experts=4), torch.zeros_like(inputs.x))


def check_rows_are_apart() -> None:
    """A padded row of NaN spoils no other."""
    from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

    inputs = moe_inputs(6, 2, 4, 32, 16)
    for config in (MATVEC, GROUPED):
        wanted = moe_experts_on_gpu(*inputs.args, config=config)
        x = inputs.x.clone()
        x[4:] = float("nan")
        found = moe_experts_on_gpu(*replace(inputs, x=x).args, config=config)
        assert torch.equal(found[:4], wanted[:4]) and found[4:].isnan().all()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check_both_ways_of_computing, marks=pytest.mark.slow),
        check_layouts_of_operands,
        check_experts_elsewhere_count_for_nothing,
        check_results_that_cancel,
        check_a_rank_without_experts,
        check_rows_are_apart,
    ],
)
def test_the_interpreted_kernel_equals_the_reference(check: Callable[[], None]) -> None:
    interpreted(check)


QWEN3 = (8, 128, 2048, 768)
MIXTRAL = (2, 8, 4096, 14336)
"""top_k, num_experts, hidden, size of a layer of Qwen3-30B-A3B and of Mixtral-8x7B."""


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [QWEN3, MIXTRAL, (4, 60, 1000, 136), (1, 16, 576, 1536)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_equals_the_reference_at_sizes_of_real_models(
    layer: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    if dtype == torch.float32 and layer == MIXTRAL:
        pytest.skip("11 GiB of weights that show nothing the others do not")
    for num_tokens in (1, 2, 3, 4, 5, 8, 17, 32, 64, 128, 256, 1000):
        inputs = moe_inputs(num_tokens, *layer, dtype=dtype, seed=num_tokens, device="cuda")
        error = relative_rms(MOE_EXPERTS(*inputs.args), _wide(inputs))
        assert error < TOLERANCE[dtype], (num_tokens, error)


def _wide(inputs: MoeInputs) -> torch.Tensor:
    """The reference over the same numbers in float64, an expert at a time."""
    x, topk_weights, topk_ids, gate_up, down, activation = inputs.args
    result = torch.zeros_like(x, dtype=torch.float64)
    for expert in topk_ids.unique().tolist():
        one = (gate_up[expert : expert + 1].double(), down[expert : expert + 1].double())
        is_chosen = topk_ids == expert
        weight = torch.where(is_chosen, topk_weights.double(), 0.0).sum(-1, keepdim=True)
        result += moe_experts_reference(x.double(), weight, torch.zeros_like(topk_ids[:, :1]), *one, activation)
    return result


@pytest.mark.gpu
def test_error_to_float64_is_at_most_that_of_the_unfused() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for num_tokens in (1, 4, 16):
            ours = theirs = 0.0
            for seed in range(8):
                inputs = moe_inputs(num_tokens, 4, 16, 512, 256, dtype=dtype, seed=seed, device="cuda")
                wanted = _wide(inputs)
                ours += relative_rms(MOE_EXPERTS(*inputs.args), wanted) ** 2
                theirs += relative_rms(unfused(inputs), wanted) ** 2
            assert ours**0.5 <= 1.1 * theirs**0.5, (dtype, num_tokens, ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 64, 300])
def test_a_captured_call_follows_the_routing_of_each_replay(num_tokens: int) -> None:
    """Bit by bit what a call gives, also where all tokens choose the same experts."""
    inputs = moe_inputs(num_tokens, *QWEN3, dtype=torch.bfloat16, device="cuda")
    MOE_EXPERTS(*inputs.args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = MOE_EXPERTS(*inputs.args)
    for seed, among in ((1, None), (2, range(8)), (3, range(100, 120))):
        other = moe_inputs(num_tokens, *QWEN3, dtype=torch.bfloat16, device="cuda", seed=seed, among=among)
        inputs.x.copy_(other.x)
        inputs.topk_weights.copy_(other.topk_weights)
        inputs.topk_ids.copy_(other.topk_ids)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, MOE_EXPERTS(*inputs.args)), seed
        graph.replay()
        assert torch.equal(out, MOE_EXPERTS(*inputs.args)), seed
