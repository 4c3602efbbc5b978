"""The split ops of a graph, found by the names a caller gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecegraph.config import DEFAULT_SPLIT_OPS
from piecegraph.errors import SplitOpNotFound, SplitOpUnused, did_you_mean
from piecegraph.passes.ops.op_types import HigherOrderOperator, OpOverload, OpOverloadPacket


def op_name(target: Any) -> str:
    """Return the name by which `split_ops` refers to an op.

    That is `"namespace::name"` for registered ops, `"aten::name"` for torch's builtins (Dynamo keeps
    `scaled_dot_product_attention` as a builtin function), `"higher_order::name"` for higher-order
    ops, and `module.qualname` for anything else.
    """
    if isinstance(target, OpOverload):
        return str(target._schema.name)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    name = getattr(target, "__name__", None)
    if name is None:
        return str(target)
    module = getattr(target, "__module__", None) or ""
    is_torch_builtin = module in ("torch._C._nn", "torch") or (not module and callable(target))
    if is_torch_builtin and hasattr(torch.ops.aten, name):
        return f"aten::{name}"
    return f"{module}.{getattr(target, '__qualname__', name)}"


def split_op_matcher(graph: fx.Graph, split_ops: Sequence[str]) -> Callable[[fx.Node], bool]:
    """Return a predicate that holds for the nodes of `graph` that are split ops.

    Raises `SplitOpNotFound` if a named op is registered nowhere, `SplitOpUnused` if it exists but
    not in this graph. The default split ops may be absent: the caller did not name them.
    """
    names_in_graph = {op_name(node.target) for node in graph.nodes if node.op == "call_function"}
    for name in split_ops:
        if name in names_in_graph or name in DEFAULT_SPLIT_OPS:
            continue
        refuse_unregistered(name, "Import the module that defines it before compiling, or remove it from split_ops.")
        candidates = sorted(n for n in names_in_graph if "::" in n and not n.startswith("aten::"))
        raise SplitOpUnused(
            f"split op {name!r} is registered, but the traced graph never calls it"
            + (
                f"; registered ops it does call: {', '.join(candidates)}."
                if candidates
                else "; it calls no registered op of yours."
            )
            + " Name the op the model calls, or leave split_ops at its default."
        )
    wanted = frozenset(split_ops)
    return lambda node: node.op == "call_function" and op_name(node.target) in wanted


def refuse_unregistered(name: str, advice: str) -> None:
    """Raise `SplitOpNotFound`, ending in `advice`, if no op of that name is registered."""
    if not _is_registered(name):
        near = did_you_mean(name, _registered_near(name))
        raise SplitOpNotFound(f"split op {name!r} is not registered.{near} {advice}")


def _is_registered(name: str) -> bool:
    namespace, _, op = name.partition("::")
    if namespace == "higher_order":
        return hasattr(torch.ops.higher_order, op)
    return bool(namespace and op) and bool(torch._C._jit_get_schemas_for_operator(name))


def _registered_near(name: str) -> list[str]:
    namespace = name.partition("::")[0]
    registered = {str(schema.name) for schema in torch._C._jit_get_all_schemas()}
    same_namespace = [n for n in registered if n.partition("::")[0] == namespace]
    if same_namespace:
        return same_namespace
    return [n for n in registered if n.partition("::")[0] not in ("aten", "prim", "prims", "quantized")]
