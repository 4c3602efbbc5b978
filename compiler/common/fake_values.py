"""Values of a graph without memory: made, computed and compared."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Node

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode


def fresh_fake_mode() -> FakeTensorMode:
    """Return a new fake mode with a shape environment of its own."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


def fake_tensor(
    fake_mode: FakeTensorMode,
    *,
    shape: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a fake tensor of that layout; `stride` and `offset` are in elements."""
    with fake_mode:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return tensor if isinstance(offset, int) and offset == 0 else tensor.as_strided(shape, stride, offset)


def propagate_fakes(graph_module: fx.GraphModule, examples: Sequence[Any], fake_mode: FakeTensorMode) -> None:
    """Give every node its example value, as Dynamo's own graphs have it."""

    class Propagate(fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = value
            return value

    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        Propagate(graph_module).run(*examples)


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """Return the fake mode of the first fake tensor among `values`; None without one."""
    modes: Iterator[FakeTensorMode | None] = (getattr(value, "fake_mode", None) for value in values)
    return next((mode for mode in modes if mode is not None), None)


@contextlib.contextmanager
def computing_on_fakes(values: Sequence[Any]) -> Iterator[None]:
    """Compute on fake tensors inside this block, in the fake mode of the first fake tensor among `values`."""
    with fake_mode_of(values) or contextlib.nullcontext(), enable_python_dispatcher(), torch.no_grad():
        yield


def computed_value(node: Node, value_key: str) -> Any:
    """Return what a call computes from the values that its arguments have in `meta[value_key]`.

    The caller is inside `computing_on_fakes`.
    """

    def value_of(read: Node) -> Any:
        if read.op == "get_attr" and value_key not in read.meta:
            return operator.attrgetter(str(read.target))(read.graph.owning_module)
        return read.meta[value_key]

    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert node.op == "call_function" and callable(node.target), node.op
    return node.target(*args, **kwargs)


def is_same_layout(one: Any, other: Any) -> bool:
    """Return whether two values of a graph agree in dtype, device, sizes, strides and offset."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(is_same_layout, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.device != other.device:
            return False
        if one.dim() != other.dim():
            return False
        layouts = ((*t.shape, *t.stride(), t.storage_offset()) for t in (one, other))
        return all(_expression(a) == _expression(b) for a, b in zip(*layouts, strict=True))
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(_expression(one) == _expression(other))
    return one is None and other is None


def _expression(size: int | torch.SymInt) -> Any:
    """Return the expression of a size, which can be compared without adding a guard."""
    return size if isinstance(size, int) else size.node.expr
