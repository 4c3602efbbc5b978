"""The ops that may rely on strides, and the tensors that reach them."""

from __future__ import annotations

import torch

from piecegraph.passes.matching.foreign_ops import is_foreign, relies_on_strides
from piecegraph.passes.ops.act_mul import ACT_MUL
from tests.passes.spelled import graph_of

_library = torch.library.Library("piecegraph_tests_foreign", "FRAGMENT")
_library.define("plain(Tensor x) -> Tensor")
_library.define("flexible(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
_library.impl("plain", torch.clone, "CompositeExplicitAutograd")


def test_torchs_ops_and_ours_take_any_strides_and_so_do_those_that_say_it() -> None:
    ops = torch.ops.piecegraph_tests_foreign
    assert is_foreign(ops.plain.default) and is_foreign(ops.plain)
    assert not is_foreign(ops.flexible.default) and not is_foreign(ops.flexible)
    for target in (torch.ops.aten.mul.Tensor, ACT_MUL, torch.relu, "view"):
        assert not is_foreign(target)


def test_an_op_is_reached_through_views_and_not_through_what_is_computed() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        op = torch.ops.piecegraph_tests_foreign.plain.default
        return op(x.view(2, 2, 3).transpose(0, 1)), op(y.neg()), y.view(12)

    graph = graph_of(function, torch.ones(4, 3), torch.ones(4, 3))
    assert [relies_on_strides(node) for node in graph.find_nodes(op="placeholder")] == [True, False]
