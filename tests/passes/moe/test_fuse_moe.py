"""Routed experts of transformers' models become one op; where they do not, the reason is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from piecegraph import LLM, SamplingParams
from piecegraph.passes.fuse_act_mul import FuseActMul
from piecegraph.passes.matching.graph_pass import GraphPass, PassResult
from piecegraph.passes.moe.fuse_moe import GROUPED_MM, FuseMoe
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from tests.passes.family_runs import Family, family, family_of_rank
from tests.passes.family_runs import prompt as prompt_of
from tests.passes.traced_family import traced_family
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tensor_parallel.ranks_in_threads import ThreadGroup, run_ranks
from tests.runner.tiny_models import make_model, save

LAYERS = {"qwen3-moe": 2, "mixtral": 2, "deepseek-v3": 1}
"""Families with routed experts as the op computes them, and in how many of their layers."""


SHARED_EXPERTS = (("mixtral", 1), ("qwen3-moe", 1), ("qwen3-moe", 2))
"""Families whose experts the ranks of one engine share, or two engines of one rank each."""


def operands(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def named(graph: fx.Graph, *names: str) -> list[fx.Node]:
    return [node for node in graph.nodes if getattr(node.target, "__name__", node.target) in names]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("before", [(), (FuseActMul(),)], ids=["alone", "after fuse-act-mul"])
@pytest.mark.parametrize("family", LAYERS)
def test_every_layer_matches(family: str, before: tuple[GraphPass, ...], dtype: torch.dtype) -> None:
    """Sort, masks, products and the sum are gone, in-place calls included; routing is left, and weights are read as
    they are stored."""
    graph, context = traced_family(family, dtype)
    for each in before:
        each.apply(graph, context)
    assert FuseMoe().apply(graph, context) == PassResult(LAYERS[family])
    graph.lint()
    assert not named(graph, *GROUPED_MM, "sort", "histc", "setitem", "masked_fill_", "clamp_", "empty_like")
    assert len(named(graph, "moe_experts.default")) == LAYERS[family]
    for node in named(graph, "moe_experts.default"):
        x, weights, ids, gate_up, down, activation = operands(node)
        assert gate_up.op == down.op == "placeholder" and activation == "silu"
        assert node.meta["example_value"].shape == x.meta["example_value"].shape
        assert weights.meta["example_value"].shape == ids.meta["example_value"].shape


@pytest.mark.parametrize("family", LAYERS)
def test_every_layer_matches_as_traced_on_a_gpu(family: str) -> None:
    """There the count is one of int32, on a CPU one of floats."""
    graph, context = traced_family(family, torch.bfloat16)
    for count in named(graph, "histc"):
        (ids,) = count.all_input_nodes
        assert ids.op == "call_method" and ids.target == "float"
        ids.target = "int"
        ids.meta["example_value"] = ids.meta["example_value"].int()
    assert FuseMoe().apply(graph, context) == PassResult(LAYERS[family])
    assert not named(graph, "histc")


@pytest.mark.parametrize(
    ("name", "num_engines"),
    [("mixtral", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in SHARED_EXPERTS)],
)
def test_experts_that_ranks_share_match_and_compute_the_model(name: str, num_engines: int) -> None:
    """Each rank has two of the four experts of a layer, and tokens choose among all."""
    whole = family(name, torch.float32)

    def part(number: int) -> Family:
        of_engines = (0, 1, ExpertRanks(engine=number, num_engines=2))
        return family_of_rank(name, torch.float32, *((number, 2, ExpertRanks()) if num_engines == 1 else of_engines))

    parts = [part(number) for number in range(2)]
    for each in parts:
        (outcome,) = each.apply(FuseMoe())
        assert (outcome.matches, outcome.misses) == (LAYERS[name], ())
        for node in named(each.graph, "moe_experts.default"):
            *_, gate_up, _, _, num_all_experts = operands(node)
            assert (gate_up.meta["example_value"].shape[0], num_all_experts) == (2, 4)
    prompts = [prompt_of(9), prompt_of(9) if num_engines == 1 else prompt_of(9).flip(0)]

    def run(group: ThreadGroup) -> torch.Tensor:
        return parts[group.rank].logits(prompts[group.rank], [8])

    for tokens, logits in zip(prompts, run_ranks(2, run), strict=True):
        torch.testing.assert_close(logits, whole.logits(tokens, [8]), rtol=1e-4, atol=2e-5)


def test_another_order_of_weights_is_read_as_a_view() -> None:
    """Stored `[experts, in, out]`, as some families have them."""
    graph, context = traced_family("mixtral", torch.bfloat16)
    for product in named(graph, *GROUPED_MM):
        transpose = product.args[1]
        assert isinstance(transpose, fx.Node)
        stored = transpose.args[0]
        assert isinstance(stored, fx.Node)
        stored.meta["example_value"] = transpose.meta["example_value"].contiguous()
        transpose.replace_all_uses_with(stored)
        graph.erase_node(transpose)
    assert FuseMoe().apply(graph, context) == PassResult(2)
    for node in named(graph, "moe_experts.default"):
        assert all(weight.target == "transpose" and weight.args[1:] == (-2, -1) for weight in operands(node)[3:5])


def test_a_model_without_experts_has_no_sites() -> None:
    graph, context = traced_family("llama", torch.bfloat16)
    before = str(graph)
    assert FuseMoe().apply(graph, context) == PassResult(0)
    assert str(graph) == before


def test_experts_in_float64_stay_there() -> None:
    graph, context = traced_family("mixtral", torch.float64)
    result = FuseMoe().apply(graph, context)
    reason = "tokens and weights are torch.float64; wanted is one dtype, float32 or shorter"
    assert [miss.reason for miss in result.misses] == [reason] * 2


def test_experts_with_biases_are_a_miss_that_says_so() -> None:
    graph, context = traced_family("gpt-oss", torch.bfloat16)
    before = str(graph)
    result = FuseMoe().apply(graph, context)
    assert result.matches == 0 and str(graph) == before
    assert len(result.misses) == 2
    assert all("experts have biases" in miss.reason for miss in result.misses)


def _read_twice(graph: fx.Graph) -> None:
    (product, *_) = named(graph, *GROUPED_MM)[1:]
    _also_return(graph, product)


def _read_inside(graph: fx.Graph) -> None:
    _also_return(graph, named(graph, "sort")[0].next.next)


def _also_return(graph: fx.Graph, node: fx.Node) -> None:
    output = next(iter(reversed(graph.nodes)))
    output.args = ((*output.args[0], node),)


def _other_activation(graph: fx.Graph) -> None:
    named(graph, "silu")[0].target = torch.relu


def _up_first(graph: fx.Graph) -> None:
    act = named(graph, "silu")[0]
    (product,) = act.users
    up = next(each for each in product.args if each is not act)
    assert isinstance(up, fx.Node)
    gate = act.args[0]
    product.args = (act, gate)
    act.args = (up,)


def _experts_elsewhere(graph: fx.Graph) -> None:
    """Twice as many are chosen among as have weights here."""
    probabilities: Any = named(graph, "topk")[0].args[0]
    value = probabilities.meta["example_value"]
    probabilities.meta["example_value"] = value.new_empty((value.shape[0], 2 * value.shape[1]))


def _descending(graph: fx.Graph) -> None:
    named(graph, "sort")[0].kwargs = {"descending": True}


def _other_dtype(graph: fx.Graph) -> None:
    weight: Any = named(graph, *GROUPED_MM)[1].args[1]
    weight.meta["example_value"] = weight.meta["example_value"].half()


def _written(graph: fx.Graph) -> None:
    """The weights of the chosen experts, after the first product."""
    (weights,) = [node for node in graph.nodes if node.name == "router_top_value_1"]
    with graph.inserting_after(named(graph, *GROUPED_MM)[0]):
        written = graph.call_method("mul_", (weights, 2.0))
    written.meta["example_value"] = weights.meta["example_value"]


def _one_product(graph: fx.Graph) -> None:
    second = named(graph, *GROUPED_MM)[1]
    second.kwargs = {**second.kwargs, "offs": None}


def _mean(graph: fx.Graph) -> None:
    node = next(node for node in named(graph, "sum") if node.kwargs == {"dim": 1})
    node.target = "mean"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_read_twice, r"out_2 is read by (proj_out_2|weighted_out), output$"),
        (_read_inside, r"is also read by output"),
        (_other_activation, r"gated by something other than act\(gate\) \* up, at (proj_out_1|proj_out)$"),
        (_up_first, "not its first and its second half"),
        (_experts_elsewhere, "router_indices is not a choice of topk among the 4 experts whose weights are here"),
        (_descending, "does not count expert ids sorted upwards"),
        (_other_dtype, "tokens and weights are torch.bfloat16, torch.float16; wanted is one dtype"),
        (_written, "is changed in place by mul_, before"),
        (_one_product, "grouped matmuls over the same groups: 1, not 2"),
        (_mean, "does not belong to a weighted sum over a token's experts"),
    ],
)
def test_a_miss_says_why_and_other_layers_match(change: Callable[[fx.Graph], None], reason: str) -> None:
    graph, context = traced_family("mixtral", torch.bfloat16)
    change(graph)
    result = FuseMoe().apply(graph, context)
    graph.lint()
    assert result.matches == 1
    assert re.search(reason, result.misses[0].reason), result.misses


@pytest.mark.parametrize(
    ("family", "compiler"),
    [*((family, "eager") for family in LAYERS), pytest.param("qwen3-moe", "inductor", marks=pytest.mark.slow)],
)
def test_tokens_equal_those_of_transformers(family: str, compiler: str, tmp_path: Path) -> None:
    """Through the whole runner, greedy, in float32."""
    model = make_model(family)
    prompts = [[5, 17, 3], [9], [7, 7, 90, 23, 41, 2, 64, 118, 30, 55, 81, 12]]
    options: dict[str, Any] = {"dtype": "float32", "compile_workers": 0, "skip_tokenizer_init": True}
    options["compilation_config"] = {"passes": ("fuse-moe",)}
    with LLM(save(model, tmp_path), compiler=compiler, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(temperature=0.0, max_tokens=16)
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)
