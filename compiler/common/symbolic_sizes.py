"""Symbolic sizes: the values they may take, and how they are made again from those facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode
from piecegraph.compiler.torch_compat.versions import symbol_hint


def shape_env_of(values: Sequence[Any]) -> ShapeEnv | None:
    """Return the shape environment of the first symbolic or fake value among `values`; None without one."""
    for value in values:
        if isinstance(value, torch.SymInt):
            return cast(ShapeEnv | None, value.node.shape_env)
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return cast(ShapeEnv, mode.shape_env)
    return None


def symbol_range(shape_env: ShapeEnv | None, symbol: Any) -> str:
    """Return the range of `symbol`, and torch's hint where there is one, as text: part of a piece's key."""
    bounds = shape_env.var_to_range.get(symbol) if shape_env is not None else None
    if shape_env is None or bounds is None:
        return "?"
    hint = symbol_facts(shape_env, symbol)["hint"]
    return f"[{bounds.lower}, {bounds.upper}]" + (f", such as {hint}" if hint is not None else "")


def symbol_facts(shape_env: ShapeEnv | None, symbol: Any) -> dict[str, Any]:
    """Return the name, range and (for a backed symbol) hint of `symbol`: enough to make an equal symbol."""
    assert shape_env is not None, f"{symbol} belongs to no shape environment"
    bounds = shape_env.var_to_range.get(symbol)
    lower = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
    upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    hint = None if shape_env.is_unbacked_symint(symbol) else symbol_hint(shape_env, symbol)
    return {"name": str(symbol), "lower": max(lower, 0), "upper": upper, "hint": hint}


def size_ranges(values: Sequence[Any]) -> dict[str, tuple[int, int | None]]:
    """Return the least and greatest value (None: unbounded) of every symbol in the sizes of `values`, by name."""
    shape_env = shape_env_of(values)
    ranges = {}
    for value in values:
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                facts = symbol_facts(shape_env, symbol)
                ranges[str(symbol)] = (facts["lower"], facts["upper"])
    return ranges


def size_at(size: int | torch.SymInt, value: int) -> int:
    """Return `size` with `value` in place of every symbol."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, value)))


def make_symbols(fake_mode: FakeTensorMode, facts: Sequence[Mapping[str, Any]]) -> dict[str, torch.SymInt]:
    """Return one new symbolic size per entry of `facts` (see `symbol_facts`), by name: unbacked without a hint."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, _constrain_range_for_size

    shape_env = fake_mode.shape_env
    assert shape_env is not None
    symbols = {}
    for fact in facts:
        if fact["hint"] is None:
            with shape_env.ignore_fresh_unbacked_symbols():  # no node makes the symbol: it is an input
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
    """Return the value of `expression`, written by sympy, over `symbols`.

    The text is evaluated as Python, so it must be data that this package wrote.
    """
    size: torch.SymInt | int = eval(expression, {"__builtins__": {}}, {**_SIZE_FUNCTIONS, **symbols})
    return size
