"""Symbolic sizes: the values they may take, and how they are made again from those facts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode
from piecegraph.compiler.torch_compat.versions import symbol_hint


class SizesAssumed(RuntimeError):
    """A compile assumed something of a dynamic size that does not hold for all of its values."""


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
        for symbol in _symbols_of(value):
            facts = symbol_facts(shape_env, symbol)
            ranges[str(symbol)] = (facts["lower"], facts["upper"])
    return ranges


@contextlib.contextmanager
def without_assumptions(values: Sequence[Any]) -> Iterator[None]:
    """Refuse what the block assumes of the symbols in the sizes of `values`: a narrower range, or an equal value.

    Raises `SizesAssumed` at the end of a block that did, after the symbols have got their ranges back.
    """
    shape_env = shape_env_of(values)
    if shape_env is None:
        yield
        return
    symbols = [symbol for value in values for symbol in _symbols_of(value)]
    before = {symbol: _known_of(shape_env, symbol) for symbol in symbols}
    ranges, replacements = dict(shape_env.var_to_range), dict(shape_env.replacements)
    try:
        yield
    finally:
        assumed = [symbol for symbol, known in before.items() if _known_of(shape_env, symbol) != known]
        told = ", ".join(f"{symbol}: {_known_of(shape_env, symbol)} after {before[symbol]}" for symbol in assumed)
        for symbol in assumed:
            shape_env.var_to_range[symbol] = ranges[symbol]
            shape_env.replacements.pop(symbol, None)
            if symbol in replacements:
                shape_env.replacements[symbol] = replacements[symbol]
        if assumed:
            shape_env._update_version_counter()
    if assumed:
        raise SizesAssumed(f"it would be right for some sizes only ({told})")


def _symbols_of(value: Any) -> Iterator[Any]:
    for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
        if isinstance(size, torch.SymInt):
            yield from size.node.expr.free_symbols


def _known_of(shape_env: ShapeEnv, symbol: Any) -> str:
    """Return what is known of `symbol`: its range, and what it equals."""
    bounds = shape_env.var_to_range.get(symbol)
    known = "any value" if bounds is None else f"{bounds.lower} to {bounds.upper}"
    return known if symbol not in shape_env.replacements else f"{known}, equal to {shape_env.replacements[symbol]}"


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
