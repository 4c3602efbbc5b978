"""Conditions on declared sizes that a traced graph relies on, such as `Eq(Mod(u0, 4), 0)`.

A trace takes conditions from sympy. A cache entry holds their text, which is read by a parser that knows arithmetic
and comparisons and nothing else: no text is ever evaluated.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Number = int | Fraction | bool
_Evaluate = Callable[[Mapping[str, int]], Number]

MAX_TEXT = 10_000
"""The most characters a condition may have; no condition of a model comes near."""


class NotACondition(ValueError):
    """An error for text that is not a condition this parser knows."""


@dataclass(frozen=True, slots=True)
class SizeCondition:
    """A condition over symbols. `text` is written by sympy."""

    text: str
    symbols: frozenset[str]
    _is_broken: Callable[[Mapping[str, int]], bool]

    @classmethod
    def from_sympy(cls, expression: Any) -> SizeCondition:
        """Return the condition that a sympy expression states."""
        symbols = {str(symbol): symbol for symbol in expression.free_symbols}

        def is_broken(values: Mapping[str, int]) -> bool:
            return bool(expression.subs({symbols[name]: value for name, value in values.items()}) == False)  # noqa: E712  (sympy's own false)

        return cls(str(expression), frozenset(symbols), is_broken)

    @classmethod
    def parse(cls, text: str) -> SizeCondition:
        """Return the condition of a text that `from_sympy` wrote. Raises `NotACondition` for any other text."""
        if len(text) > MAX_TEXT:
            raise NotACondition(f"a condition of {len(text)} characters")
        try:
            tree = ast.parse(text, mode="eval").body
            symbols: set[str] = set()
            evaluate = _evaluator(tree, symbols)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise NotACondition(f"{text!r}: {type(error).__name__}") from None
        return cls(text, frozenset(symbols), lambda values: not evaluate(values))

    def is_violated_by(self, values: Mapping[str, int]) -> bool:
        """Return whether the condition cannot hold when each of its symbols has its value in `values`."""
        return self._is_broken({name: values[name] for name in self.symbols})

    def with_size_names(self, names: Mapping[str, str]) -> str:
        """Return the text of the condition with each symbol replaced by the name of its size."""
        text = self.text
        for symbol in sorted(self.symbols, key=len, reverse=True):
            text = text.replace(symbol, names[symbol])
        return text


_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: Fraction(a) / Fraction(b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: lambda a, b: bool(a) and bool(b),
    ast.BitOr: lambda a, b: bool(a) or bool(b),
}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Lt": operator.lt,
    "Le": operator.le,
    "Gt": operator.gt,
    "Ge": operator.ge,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "ModularIndexing": lambda base, divisor, modulus: (base // divisor) % modulus,
    "Max": max,
    "Min": min,
}


def _evaluator(node: ast.expr, symbols: set[str]) -> _Evaluate:
    """Return a function that computes `node`, and add the names in `node` to `symbols`. Raises `NotACondition`."""
    match node:
        case ast.Constant(value=bool() | int() as value):
            return lambda values: value
        case ast.Name(id=name):
            if name in ("True", "False"):
                return lambda values: name == "True"
            symbols.add(name)
            return lambda values: values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _evaluator(operand, symbols)
            return lambda values: -inner(values)
        case ast.UnaryOp(op=ast.Invert() | ast.Not(), operand=operand):
            inner = _evaluator(operand, symbols)
            return lambda values: not inner(values)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if 0 <= power <= 8:
            base = _evaluator(left, symbols)
            return lambda values: base(values) ** power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _applied(_OPERATIONS[type(op)], (left, right), symbols)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return _applied(_COMPARISONS[type(op)], (left, right), symbols)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if name in _FUNCTIONS:
            return _applied(_FUNCTIONS[name], arguments, symbols)
    raise NotACondition(f"{ast.unparse(node)!r} is not arithmetic on sizes")


def _applied(function: Callable[..., Number], arguments: Any, symbols: set[str]) -> _Evaluate:
    inner = [_evaluator(argument, symbols) for argument in arguments]
    return lambda values: function(*(each(values) for each in inner))
