"""Words for torch IR as Dynamo writes it: what a node computes, whichever way the model's author spelt it."""

from __future__ import annotations

from typing import Any

from torch import fx


def value_of(node: fx.Node) -> Any:
    """The example value Dynamo computed for a node: a FakeTensor, a SymInt, a tuple of these, or None."""
    return node.meta.get("example_value")
