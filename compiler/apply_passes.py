"""Passes over the traced graph, and what they mean for the tensors it is bound to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from piecegraph.compiler import torch_compat
from piecegraph.compiler.normalize import value_of
from piecegraph.compiler.report import PassRow
from piecegraph.compiler.split_ops import split_op_matcher
from piecegraph.compiler.trace import BoundInput, GraphInput, Traced
from piecegraph.config import CompileConfig
from piecegraph.passes import merge_projections as merging


def apply_passes(traced: Traced, config: CompileConfig) -> tuple[Traced, tuple[PassRow, ...]]:
    """`traced` with `config.passes` applied, its graph rewritten in place, and a row for each pass.

    Mutates the module: weights that were merged become views of the merged tensor, so memory does not
    grow and `state_dict` is what it was.
    """
    rows = []
    for name in config.passes:
        start = time.perf_counter()
        assert name == merging.NAME, name
        traced, matches = _merge_projections(traced, config)
        rows.append(PassRow(name=name, matches=matches, seconds=time.perf_counter() - start))
    return traced, tuple(rows)


def _merge_projections(traced: Traced, config: CompileConfig) -> tuple[Traced, int]:
    graph = traced.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs: dict[fx.Node, GraphInput] = dict(zip(placeholders, traced.inputs, strict=True))

    def is_weight(node: fx.Node) -> bool:
        bound = inputs[node]
        return isinstance(bound, BoundInput) and bound.kind == "parameter" and _is_alone(bound.tensor)

    merged = merging.merge_projections(graph, is_weight, split_op_matcher(graph, config.split_ops))
    if not merged:
        return traced, 0
    for group in merged:
        for tensor in group.tensors:
            inputs[tensor.placeholder] = bound = _store_together(tensor, inputs)
            tensor.placeholder.meta["example_value"] = _like(value_of(tensor.members[0]), bound.tensor)
    torch_compat.refresh_examples(graph, [group.linear for group in merged])
    graph.lint()
    traced.graph_module.recompile()
    remaining = tuple(inputs[node] for node in graph.nodes if node.op == "placeholder")
    return replace(traced, inputs=remaining), len(merged)


def _store_together(tensor: merging.MergedTensor, inputs: Mapping[fx.Node, GraphInput]) -> BoundInput:
    """One tensor that holds all members; each member becomes a view of its part."""
    members = [inputs[node] for node in tensor.members]
    bound = [member for member in members if isinstance(member, BoundInput)]
    assert len(bound) == len(members), members
    together = torch.cat([member.tensor.detach() for member in bound])
    start = 0
    for member in bound:
        end = start + member.tensor.shape[0]
        member.tensor.data = together[start:end]
        start = end
    return BoundInput(name="+".join(member.name for member in bound), kind="merged", tensor=together)


def _is_alone(tensor: torch.Tensor) -> bool:
    """It has its memory to itself, so giving it other memory takes nothing from anybody."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _like(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return fake.new_empty(tensor.shape)
