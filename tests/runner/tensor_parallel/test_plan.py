"""What cannot be divided is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import EXPERT_MODULES, RankPlan, check_heads, rank_plan
from piecegraph.runner.tensor_parallel.shards import HeadSplit
from tests.runner.tiny_models import make_model


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM has no plan for tensor parallelism"):
        rank_plan(make_model("opt"), 0, 2)


def test_a_plan_that_divides_no_layer_is_refused() -> None:
    """The plan of gpt-oss from transformers 5.24 on: each rank would compute all layers."""
    model: Any = make_model("llama")
    model.config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise"}
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no plan for tensor parallelism of its layers"):
        rank_plan(model, 0, 2)


@pytest.mark.parametrize("style", EXPERT_MODULES)
def test_experts_are_divided_whole_by_the_plans_of_all_versions_of_transformers(style: str) -> None:
    model: Any = make_model("mixtral")
    experts = "layers.*.mlp.experts"
    model.config.base_model_ep_plan = {
        f"{experts}.gate_up_proj": "grouped_gemm",
        f"{experts}.down_proj": "grouped_gemm",
        experts: style,
    }
    plan = rank_plan(model, 0, 2, experts=ExpertRanks())
    assert plan.num_experts == model.config.num_local_experts // 2
    assert plan.styles["model.layers.0.mlp.experts"] == "ep_experts"


def test_an_unknown_style_is_refused_with_its_module() -> None:
    model: Any = make_model("llama")
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "layers.*.mlp.up_proj": "sequence_parallel"}
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp\.up_proj is 'sequence_parallel'"):
        rank_plan(model, 0, 2)


def test_rows_that_are_no_heads_are_refused() -> None:
    model = make_model("llama")
    model.config.num_attention_heads = 5
    with pytest.raises(UnsupportedModel, match=r"self_attn\.\w_proj has \d+ rows, which are not those of 5 heads"):
        rank_plan(model, 0, 2)


def test_heads_of_the_graph_are_compared_with_the_plan() -> None:
    plan = RankPlan(rank=0, num_ranks=2, heads=HeadSplit.of(8, 4, 2), shards={})
    check_heads(plan, [("divided", 4, 2), ("whole", 8, 4)])
    check_heads(None, [("any", 1, 1)])
    with pytest.raises(UnsupportedModel, match="odd computes 3 query heads and 1 KV heads on a rank"):
        check_heads(plan, [("odd", 3, 1)])


def test_layers_with_different_groups_are_refused() -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.num_key_value_groups = 4
    with pytest.raises(UnsupportedModel, match="layers differ in their number of heads"):
        rank_plan(model, 0, 2)
