"""Traced graphs of small models with random weights, run as they are: logits before and after a pass."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from transformers import AutoModelForCausalLM

from piecegraph.compiler.common.split_ops import split_op_matcher
from piecegraph.compiler.repeated_layers.find import name_layers
from piecegraph.compiler.rewriting.pass_contexts import TracedContext
from piecegraph.compiler.rewriting.run_pass import PassOutcome, run_pass
from piecegraph.compiler.splitting.normalize import normalize
from piecegraph.compiler.splitting.piece import UniquePiece, unique_pieces
from piecegraph.compiler.splitting.split import Piece, split
from piecegraph.compiler.tracing.signature import ArgumentInput, BoundInput, SizeInput
from piecegraph.compiler.tracing.trace import Traced, trace
from piecegraph.config import DEFAULT_SPLIT_OPS
from piecegraph.passes.matching.graph_pass import GraphPass
from piecegraph.runner.attention.interface.transformers_attention import register_attention
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import rank_plan
from piecegraph.runner.tensor_parallel.sharded_modules import fill_rank_buffers, shard_model
from tests.runner.tiny_models import FAMILIES, MAX_LEN, UNLISTED, VOCAB_SIZE


@dataclass(frozen=True)
class Family:
    """A model's graph, to be rewritten, and what it takes to run it."""

    traced: Traced
    graph: fx.Graph

    def apply(self, *passes: GraphPass) -> list[PassOutcome]:
        """Run passes as the compiler does, which checks what they promise. None may fail."""
        context = TracedContext(self.graph, self.traced.inputs, split_op_matcher(self.graph, DEFAULT_SPLIT_OPS))
        outcomes = [run_pass(each, self.graph, context) for each in passes]
        assert not any(outcome.error for outcome in outcomes), outcomes
        return outcomes

    def nodes_after_attention(self) -> list[fx.Node]:
        """Calls behind the last split op."""
        is_split_op = split_op_matcher(self.graph, DEFAULT_SPLIT_OPS)
        nodes = [node for node in self.graph.nodes if node.op != "placeholder"]
        return nodes[max(i for i, node in enumerate(nodes) if is_split_op(node)) + 1 :]

    def unique_pieces(self) -> tuple[UniquePiece, ...]:
        """Return the unique pieces that would be compiled."""
        graph_module = fx.GraphModule(nn.Module(), copy.deepcopy(self.graph))
        is_split_op = split_op_matcher(graph_module.graph, DEFAULT_SPLIT_OPS)
        normalize(graph_module, is_split_op, frozenset(self.traced.size_symbols))
        return unique_pieces([part for part in split(graph_module, is_split_op) if isinstance(part, Piece)])

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor, logits_indices: Sequence[int]) -> torch.Tensor:
        """Return the logits of one request, all of whose tokens are given, computed eagerly."""
        graph = copy.deepcopy(self.graph)
        for node in graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.piecegraph.attention.default:
                node.target = _causal_attention
        inputs = graph_inputs(self.traced, (input_ids, torch.arange(len(input_ids)), torch.tensor(logits_indices)))
        (logits,) = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*inputs)
        assert isinstance(logits, torch.Tensor)
        return logits


def graph_inputs(traced: Traced, arguments: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of a traced graph's placeholders when the module is called with `arguments`."""
    inputs: list[Any] = []
    for each in traced.inputs:
        match each:
            case SizeInput():
                inputs.append(arguments[each.leaf].shape[each.dim])
            case ArgumentInput():
                inputs.append(arguments[each.leaf])
            case BoundInput():
                inputs.append(each.tensor)
    return inputs


def family(name: str, dtype: torch.dtype, num_layers: int | None = None) -> Family:
    """A graph of one's own of family `name`."""
    traced = _traced(name, dtype, num_layers)
    return Family(traced, copy.deepcopy(traced.graph_module.graph))


def family_of_rank(
    name: str, dtype: torch.dtype, rank: int, num_ranks: int, experts: ExpertRanks | None = None
) -> Family:
    """A graph of one's own of the part of family `name` that one of several ranks computes."""
    traced = _traced(name, dtype, None, rank, num_ranks, experts)
    return Family(traced, copy.deepcopy(traced.graph_module.graph))


def prompt(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)


@cache  # five files of tests ask for most families
def _traced(
    name: str,
    dtype: torch.dtype,
    num_layers: int | None,
    rank: int = 0,
    num_ranks: int = 1,
    experts: ExpertRanks | None = None,
) -> Traced:
    register_attention()
    config = {**FAMILIES, **UNLISTED}[name]()
    if num_layers is not None:
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        config.num_hidden_layers = num_layers
        config.layer_types = (kinds * num_layers)[:num_layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="piecegraph").eval()
    for parameter in model.parameters():  # norm weights are all ones, and biases and sinks zero, at first
        if parameter.dim() <= 1:
            nn.init.normal_(parameter, mean=float(parameter.data.float().mean()), std=0.2)
    fix_longrope(model, MAX_LEN)
    if num_ranks > 1 or experts is not None:
        model.requires_grad_(False)
        plan = rank_plan(model, rank, num_ranks, experts=experts)
        shard_model(model, plan)
        fill_rank_buffers(model, plan)
    name_layers(model)
    traced = trace(CausalLMForward(model), example_inputs(torch.device("cpu")), {}, DYNAMIC_DIMS)
    gc.collect()
    gc.freeze()  # or every collection of garbage in the process would walk over it
    return traced


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, scale: float, *rest: object
) -> None:
    """In the place of the op: no windows, caps and sinks, for they are no concern of passes over the rest."""
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    out.copy_(attended[0].transpose(0, 1))
