"""Traced graphs of transformers' own models, small, as passes get them."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import fx
from transformers import AutoModelForCausalLM

from piecegraph.compiler.split_ops import split_op_matcher
from piecegraph.compiler.trace import BoundInput, Traced, trace
from piecegraph.config import DEFAULT_SPLIT_OPS
from piecegraph.passes.merge_projections import MergeProjections
from piecegraph.runner.attention.transformers_attention import name_layers, register_attention
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.rope import fix_longrope
from tests.passes.pass_context import FakeContext
from tests.runner.tiny_models import FAMILIES, MAX_LEN, UNLISTED


class FamilyContext(FakeContext):
    """Parameters of the model are weights."""

    def __init__(self, graph: fx.Graph, parameters: frozenset[str]) -> None:
        super().__init__(graph, split_op_matcher(graph, DEFAULT_SPLIT_OPS))
        self.parameters = parameters

    def is_weight(self, node: fx.Node) -> bool:
        return node.name in self.parameters


def traced_family(name: str, dtype: torch.dtype) -> tuple[fx.Graph, FamilyContext]:
    """A graph of one's own of family `name`, and what its passes may ask."""
    traced = _traced(name, dtype)
    graph = copy.deepcopy(traced.graph_module.graph)
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    inputs = zip(placeholders, traced.inputs, strict=True)
    parameters = (each for each, bound in inputs if isinstance(bound, BoundInput) and bound.kind == "parameter")
    return graph, FamilyContext(graph, frozenset(parameters))


def merged_family(name: str, dtype: torch.dtype) -> tuple[fx.Graph, FamilyContext]:
    """The same after `merge-projections`, with a value for each node."""
    graph, context = traced_family(name, dtype)
    MergeProjections().apply(graph, context)
    for node in graph.nodes:
        if node.op == "call_function" and "example_value" not in node.meta:
            values = fx.map_arg(node.args, lambda used: used.meta["example_value"])
            node.meta["example_value"] = node.target(*values)
    return graph, context


@cache
def _traced(name: str, dtype: torch.dtype) -> Traced:
    register_attention()
    config = {**FAMILIES, **UNLISTED}[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="piecegraph").eval()
    name_layers(model)
    fix_longrope(model, MAX_LEN)
    return trace(CausalLMForward(model), example_inputs(torch.device("cpu")), {}, DYNAMIC_DIMS)
