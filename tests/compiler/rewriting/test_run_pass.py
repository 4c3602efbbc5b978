"""A pass over one graph: new nodes get values and tags, and a pass that breaks a promise is undone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from piecegraph.compiler.common.source_line import source_line
from piecegraph.compiler.common.split_ops import split_op_matcher
from piecegraph.compiler.rewriting.graph_snapshot import graph_text
from piecegraph.compiler.rewriting.pass_contexts import FixedInputs
from piecegraph.compiler.rewriting.run_pass import PassOutcome, run_pass
from piecegraph.compiler.tracing.trace import trace
from piecegraph.passes.matching.graph_pass import GraphPass
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch
from tests.compiler.user_passes import Breaks, ReluToClamp, SwapsSilently, SwapsSplitOps

WRONG = {
    "raises": "KeyError: 'no such thing'",
    "lint": "used before it has been defined",
    "computes nothing": "TypeError",
    "one output more": "the graph had 1 outputs and now has 2",
    "dtype": r"output 0 was float32\[.*, 32\] on cpu and now is float64\[.*, 32\] on cpu",
    "shape": r"output 0 was float32\[.*, 32\] on cpu and now is float32\[32\*.*\] on cpu",
    "no result": "apply returned None; it must return a PassResult",
    "silent change": "it says that it matched nothing, but it changed the graph",
    "no change": "it says that it matched 2 times, but it changed nothing",
    "negative": "it says that it matched -1 times; that is a whole number, 0 or more",
    "bool": "it says that it matched True times",
    "miss": r"misses has 'relu'; it must hold Miss\(node, reason\)",
    "loses a split op": "the graph had 3 split ops and now has 2",
    "adds a split op": "the graph had 3 split ops and now has 4",
    "erases an input": "it erased the input .*; only weights may go",
    "adds an input": "it added the input mine; new inputs come from context.concatenated",
    "concatenates anything": "ValueError: no input of this graph is a weight",
    "erases what is read": "RuntimeError: Tried to erase Node relu",
}


@pytest.fixture(scope="module")
def traced() -> fx.GraphModule:
    return trace(Decoder(), batch(4), {}, DIMS).graph_module


def ran(graph_pass: GraphPass, graph: fx.Graph) -> PassOutcome:
    return run_pass(graph_pass, graph, FixedInputs(split_op_matcher(graph, SPLIT_OPS)))


@pytest.mark.parametrize("how", WRONG)
def test_a_pass_that_breaks_a_promise_is_undone(traced: fx.GraphModule, how: str) -> None:
    """The graph has its old names, arguments and values, and can be changed further."""
    before, names = graph_text(traced.graph), [node.name for node in traced.graph.nodes]
    outcome = ran(Breaks(how=how), traced.graph)
    assert outcome.matches == 0
    with pytest.raises(AssertionError, match=WRONG[how]):
        raise AssertionError(outcome.error)
    assert (graph_text(traced.graph), [node.name for node in traced.graph.nodes]) == (before, names)
    traced.graph.lint()
    assert ran(Breaks(how="no change"), traced.graph).error  # a second one is undone as well


def test_nodes_made_by_a_pass_have_tags_and_values(traced: fx.GraphModule) -> None:
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    outcome = ran(ReluToClamp(at_most=2), graph)
    assert (outcome.matches, outcome.nodes_removed, outcome.error) == (2, 0, "")
    made = [node for node in graph.nodes if node.meta.get("made_by") == "relu-to-clamp"]
    assert [node.target for node in made] == [torch.clamp_min, torch.clamp_min]
    assert all(str(node.meta["example_value"].shape[1]) == "16" for node in made)
    assert all("torch.relu(out)" in source_line(node) for node in made)  # the line of what they replace
    (miss,) = outcome.misses
    assert miss.reason == "only 2 may match"
    assert miss.line.endswith("(result: torch.Tensor = hidden + self.project(torch.relu(out)))")
    assert "toy.py:" in miss.line
    assert ran(ReluToClamp(at_most=1), graph).matches == 1
    assert replace(ran(ReluToClamp(), graph), seconds=0.0) == PassOutcome()  # nothing left, nothing changed


def test_only_passes_that_declare_it_may_replace_split_ops() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(3, device="meta")
    triple: Any = graph.call_function(torch.ops.pgtoy.triple.default, (x,))
    triple.meta["example_value"] = torch.empty(3, device="meta")
    graph.output((triple,)).meta["example_value"] = None
    context = FixedInputs(lambda node: str(node.target).startswith("pgtoy"))
    silently = run_pass(SwapsSilently(), graph, context)
    assert silently.error == ("it put pgtoy::pair in the place of pgtoy::triple and does not say replaces_split_ops")
    assert run_pass(SwapsSplitOps(), graph, context).matches == 1


def test_readers_of_another_layout_are_computed_again() -> None:
    """Readers of a value whose strides a pass changed are computed again, as far as they change too."""

    class Transposes(GraphPass):
        name = "transposes"

        def apply(self, graph: fx.Graph, context: Any) -> Any:
            from piecegraph.passes.matching.graph_pass import PassResult

            clone = next(node for node in graph.nodes if node.target == "clone")
            clone.replace_all_uses_with(clone.args[0])
            graph.erase_node(clone)
            return PassResult(matches=1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x.t().clone(memory_format=torch.contiguous_format).relu().sum(0)
        return made

    graph_module = fx.symbolic_trace(forward)
    value: Any = torch.empty(3, 4, device="meta")
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            node.meta["example_value"] = value
        elif node.op == "call_method":
            value = getattr(value, node.target)(*node.args[1:], **node.kwargs)
            node.meta["example_value"] = value
    assert run_pass(Transposes(), graph_module.graph, FixedInputs()).error == ""
    relu = next(node for node in graph_module.graph.nodes if node.target == "relu")
    assert relu.meta["example_value"].stride() == (1, 4)
