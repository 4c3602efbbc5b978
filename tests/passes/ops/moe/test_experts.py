"""The op is transformers' experts, rounded less often: on a CPU, and by the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from piecegraph.passes.ops.act_mul import ACTIVATIONS
from piecegraph.passes.ops.moe.experts import MOE_EXPERTS
from tests.passes.moe_inputs import MoeInputs, exact, moe_inputs, relative_rms, unfused
from tests.passes.relative_error import Tensors, assert_no_less_exact, quick_and_all
from tests.runner.tiny_models import make_config

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [
    (num_tokens, top_k, num_experts, hidden, size)
    for num_tokens in (1, 2, 3, 4, 5, 6, 8, 9, 13, 16, 24)
    for num_experts in (4, 5, 6, 8, 16)
    for top_k, hidden, size in ((2, 64, 40), (4, 48, 24))
]
"""Those that kernels are compiled for are few; what they run as, matvecs or blocks of 16 to 64 rows, is in all."""

SIZES = [(1, 2, 4), (5, 3, 8), (9, 1, 3), (3, 4, 4), (50, 2, 16)]
"""num_tokens, top_k, num_experts"""


def transformers_experts(inputs: MoeInputs, kind: type[torch.nn.Module]) -> torch.Tensor:
    """Their eager loop over experts."""
    num_experts, hidden, size = inputs.down.shape
    name = "Qwen3MoeConfig" if kind is Qwen3MoeExperts else "MixtralConfig"
    config = make_config(
        name, hidden_size=hidden, intermediate_size=size, moe_intermediate_size=size, num_local_experts=num_experts,
        num_experts=num_experts,
    )  # fmt: skip
    config._experts_implementation = "eager"
    experts: Any = kind(config)
    with torch.no_grad():
        experts.gate_up_proj.copy_(inputs.gate_up)
        experts.down_proj.copy_(inputs.down)
        result: torch.Tensor = experts(inputs.x, inputs.topk_ids, inputs.topk_weights)
    return result


@pytest.mark.parametrize("kind", [Qwen3MoeExperts, MixtralExperts])
@pytest.mark.parametrize("sizes", SIZES)
def test_results_equal_transformers_experts(sizes: tuple[int, int, int], kind: type[torch.nn.Module]) -> None:
    """Choices are random, or leave some experts without tokens."""
    for seed, among in ((0, None), (1, range(sizes[1]))):
        inputs = moe_inputs(*sizes, 24, 16, seed=seed, among=among)
        torch.testing.assert_close(MOE_EXPERTS(*inputs.args), transformers_experts(inputs, kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_error_to_float64_is_at_most_that_of_the_unfused(dtype: torch.dtype, activation: str) -> None:
    """1.1 times over 8 seeds, shape by shape; weights in float32 (Mixtral) or rounded too (Qwen3)."""
    for sizes in SIZES:
        for weights in (torch.float32, dtype):
            ours = theirs = 0.0
            for seed in range(8):
                inputs = moe_inputs(*sizes, 64, 32, dtype=dtype, seed=seed, activation=activation)
                inputs = replace(inputs, topk_weights=inputs.topk_weights.to(weights))
                wanted = exact(inputs)
                ours += relative_rms(MOE_EXPERTS(*inputs.args), wanted) ** 2
                theirs += relative_rms(unfused(inputs), wanted) ** 2
            assert ours**0.5 <= 1.1 * theirs**0.5, (sizes, weights, ours, theirs)


def make_inputs(shape: torch.Size, random: torch.Generator) -> Tensors:
    num_tokens, top_k, num_experts, hidden, size = shape
    inputs = moe_inputs(num_tokens, top_k, num_experts, hidden, size, seed=random.initial_seed())
    return inputs.x, inputs.topk_weights, inputs.topk_ids, inputs.gate_up, inputs.down


def num_terms(shape: Sequence[int]) -> int:
    """Of the three products, two of which are multiplied with each other, and of the experts of a token."""
    _, top_k, _, hidden, size = shape
    return 2 * hidden + size + top_k


def both_weights(*operands: torch.Tensor) -> tuple[MoeInputs, MoeInputs]:
    """The weight of an expert rounded like all else (Qwen3), and in float32 (Mixtral)."""
    x, topk_weights, topk_ids, gate_up, down = operands
    rounded = MoeInputs(x=x, topk_weights=topk_weights, topk_ids=topk_ids, gate_up=gate_up, down=down)
    wide = torch.promote_types(x.dtype, torch.float32)
    return rounded, replace(rounded, topk_weights=topk_weights.to(wide))


def check_against_unfused(dtype: torch.dtype, device: str, shapes: Sequence[Sequence[int]] = SHAPES) -> None:
    def fused(*operands: torch.Tensor) -> Tensors:
        return [MOE_EXPERTS(*inputs.args) for inputs in both_weights(*operands)]

    def separate(*operands: torch.Tensor) -> Tensors:
        return [unfused(inputs) for inputs in both_weights(*operands)]

    def wanted(*operands: torch.Tensor) -> Tensors:
        return [exact(both_weights(*operands)[0])] * 2

    assert_no_less_exact(fused, separate, wanted, make_inputs, shapes, dtype, device, num_terms=num_terms)


@pytest.mark.parametrize("shapes", quick_and_all(SHAPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_no_less_exact_than_the_unfused(dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> None:
    check_against_unfused(dtype, "cpu", shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_are_no_less_exact_than_the_unfused(dtype: torch.dtype) -> None:
    check_against_unfused(dtype, "cuda")


def test_float64_stays_float64() -> None:
    inputs = moe_inputs(3, 2, 4, 24, 16).to(torch.float64)
    torch.testing.assert_close(MOE_EXPERTS(*inputs.args), exact(inputs), rtol=1e-12, atol=1e-12)


def test_an_expert_that_overflows_is_nothing_to_tokens_that_did_not_choose_it() -> None:
    inputs = moe_inputs(4, 2, 4, 24, 16, among=range(3))
    wanted = MOE_EXPERTS(*inputs.args)
    inputs.down[3] = float("inf")
    assert torch.equal(MOE_EXPERTS(*inputs.args), wanted)


def test_the_op_is_what_torch_expects_of_ops() -> None:
    """Its schema tells the truth, and its fake result has the real one's shape, dtype and strides."""
    inputs = moe_inputs(3, 2, 4, 24, 16, dtype=torch.bfloat16)
    torch.library.opcheck(MOE_EXPERTS, inputs.args, test_utils=("test_schema", "test_faketensor"))
    strided = replace(inputs, x=torch.cat([inputs.x, inputs.x], 1)[:, :24])
    torch.library.opcheck(MOE_EXPERTS, strided.args, test_utils=("test_schema", "test_faketensor"))
