"""Sizes that are symbols: what they may be, and how they are made again from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph.compiler.torch_compat import example_of


def shape_env_of(values: Sequence[Any]) -> ShapeEnv | None:
    """The shape environment of the first symbolic or fake value among `values`."""
    for value in values:
        if isinstance(value, torch.SymInt):
            return cast(ShapeEnv | None, value.node.shape_env)
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return cast(ShapeEnv, mode.shape_env)
    return None


def symbol_range(shape_env: ShapeEnv | None, symbol: Any) -> str:
    """The values `symbol` may take, and one it has where torch has an example, as text: part of a piece's key."""
    bounds = shape_env.var_to_range.get(symbol) if shape_env is not None else None
    if shape_env is None or bounds is None:
        return "?"
    hint = symbol_facts(shape_env, symbol)["hint"]
    return f"[{bounds.lower}, {bounds.upper}]" + (f", such as {hint}" if hint is not None else "")


def symbol_facts(shape_env: ShapeEnv | None, symbol: Any) -> dict[str, Any]:
    """Name, range and, for a size torch has an example of, the example: enough to make it again."""
    assert shape_env is not None, f"{symbol} belongs to no shape environment"
    bounds = shape_env.var_to_range.get(symbol)
    lower = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
    upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    hint = None if shape_env.is_unbacked_symint(symbol) else example_of(shape_env, symbol)
    return {"name": str(symbol), "lower": max(lower, 0), "upper": upper, "hint": hint}


def size_ranges(values: Sequence[Any]) -> dict[str, tuple[int, int | None]]:
    """Least and greatest value (None: unbounded) of every symbol in the sizes of `values`, by name."""
    shape_env = shape_env_of(values)
    ranges = {}
    for value in values:
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                facts = symbol_facts(shape_env, symbol)
                ranges[str(symbol)] = (facts["lower"], facts["upper"])
    return ranges


def size_at(size: int | torch.SymInt, value: int) -> int:
    """A size where every symbol is `value`."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, value)))


def make_symbols(fake_mode: FakeTensorMode, facts: Sequence[Mapping[str, Any]]) -> dict[str, torch.SymInt]:
    """One symbolic size per `symbol_facts`, by name: unbacked where there is no hint."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, _constrain_range_for_size

    shape_env = fake_mode.shape_env
    assert shape_env is not None
    symbols = {}
    for fact in facts:
        if fact["hint"] is None:
            with shape_env.ignore_fresh_unbacked_symbols():  # no node makes it: it comes in
                size = shape_env.create_unbacked_symint()
            _constrain_range_for_size(size, min=fact["lower"], max=fact["upper"])
        else:
            source = ConstantSource(fact["name"])
            symbol = shape_env.create_symbol(fact["hint"], source=source, dynamic_dim=DimDynamic.DYNAMIC)
            size = cast(torch.SymInt, shape_env.create_symintnode(symbol, hint=fact["hint"], source=source))
        symbols[fact["name"]] = size
    return symbols


_SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def evaluate_size(expression: str, symbols: Mapping[str, torch.SymInt | int]) -> torch.SymInt | int:
    """The size that `expression`, written by sympy, means over `symbols`. Our own data only: it is evaluated."""
    size: torch.SymInt | int = eval(expression, {"__builtins__": {}}, {**_SIZE_FUNCTIONS, **symbols})
    return size
