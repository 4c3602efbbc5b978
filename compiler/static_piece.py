"""Pieces for one static size: which there are, and what each is known by."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.normalize import symbols_of
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.report import NOTHING_TO_GAIN
from piecegraph.compiler.size_conditions import SizeCondition
from piecegraph.compiler.split import Piece
from piecegraph.compiler.split_ops import op_name
from piecegraph.compiler.symbolic_sizes import size_ranges
from piecegraph.passes.effects import viewed


@dataclass(frozen=True, kw_only=True)
class StaticPiece:
    """A unique piece with every size it takes fixed to `size`."""

    piece: UniquePiece
    size: int
    symbols: frozenset[str]

    @cached_property
    def key(self) -> str:
        """sha256 over the dynamic piece's canonical text and the size, hex."""
        return hashlib.sha256(f"{self.piece.text}\nevery size is {self.size}".encode()).hexdigest()

    @property
    def sizes(self) -> dict[str, int]:
        """The number each symbol of the piece is."""
        return dict.fromkeys(sorted(self.symbols), self.size)

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        """Which inputs of the dynamic piece the static one takes: all but the sizes."""
        return tuple(i for i, value in enumerate(self.piece.examples) if isinstance(value, torch.Tensor))


@dataclass(frozen=True, slots=True)
class Refused:
    """A unique piece that stays dynamic at a size, and why."""

    unique: int
    size: int
    reason: str


def symbols_by_unique(unique: Sequence[UniquePiece], pieces: Sequence[Piece]) -> tuple[frozenset[str], ...]:
    """The symbols each unique piece's sizes are made of, in whichever place of the model it runs."""
    return tuple(
        frozenset().union(
            *(_symbols_taken(node.meta.get("example_value")) for i in p.pieces for node in pieces[i].inputs)
        )
        for p in unique
    )


def _symbols_taken(value: Any) -> set[str]:
    if isinstance(value, torch.Tensor):
        return set().union(*map(symbols_of, (*value.shape, *value.stride(), value.storage_offset())))
    return symbols_of(value)


def static_pieces(
    unique: Sequence[UniquePiece],
    symbols: Sequence[frozenset[str]],
    sizes: Sequence[int],
    declared: Mapping[str, str],
    conditions: Sequence[SizeCondition],
) -> tuple[tuple[StaticPiece, ...], tuple[Refused, ...]]:
    """One static piece per size and unique piece that gains by it, in that order: it takes sizes, and computes
    something itself instead of calling ops of passes alone, which see each call's sizes.

    `symbols` is what `symbols_by_unique` returns, `declared` the symbols whose value a call tells and what
    they are called, `conditions` what holds for every call. Refused are pieces that take another symbol or sum over
    nothing, and sizes no call can have.
    """
    made: list[StaticPiece] = []
    refused: list[Refused] = []
    for size in sizes:
        for piece, taken in zip(unique, symbols, strict=True):
            if not taken or _leaves_sizes_to_ops(piece):
                continue  # it would be the same piece again
            reason = _reason_to_refuse(piece, taken, size, declared, conditions)
            if reason is None:
                made.append(StaticPiece(piece=piece, size=size, symbols=taken))
            else:
                refused.append(Refused(piece.index, size, reason))
    return tuple(made), tuple(refused)


def gains_by_static_size(piece: UniquePiece) -> bool:
    """Whether `static_pieces` has one of it, at a size a call can have, if it takes sizes."""
    return not _sums_over_nothing(piece)


def _leaves_sizes_to_ops(piece: UniquePiece) -> bool:
    return all(map(_is_left_to_ops, _calls(piece)))


def _sums_over_nothing(piece: UniquePiece) -> bool:
    """All that is not left to ops is known to be computed number by number."""
    return all(_is_left_to_ops(node) or _name(node) in NUMBER_BY_NUMBER for node in _calls(piece))


def _calls(piece: UniquePiece) -> list[fx.Node]:
    return [node for node in piece.graph_module.graph.nodes if node.op in ("call_function", "call_method")]


NUMBER_BY_NUMBER = frozenset(
    "abs add and_ cat clamp clone contiguous copy_ cos detach div empty_like embedding eq exp float full_like ge gelu "
    "getitem gt half index_select le log lt masked_fill mul ne neg new_zeros or_ pow reciprocal relu repeat rsqrt rsub "
    "sigmoid silu sin softplus sqrt stack sub tanh to truediv type type_as unsqueeze where zeros_like bfloat16".split()
)
"""Functions and methods by name."""


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_left_to_ops(node: fx.Node) -> bool:
    """An op of a pass, an item of its results, a view, or new memory."""
    return (
        op_name(node.target).startswith("piecegraph::")
        or node.target in ("new_empty", operator.getitem)
        or viewed(node) is not None
    )


def _reason_to_refuse(
    piece: UniquePiece,
    taken: frozenset[str],
    size: int,
    declared: Mapping[str, str],
    conditions: Sequence[SizeCondition],
) -> str | None:
    if not taken <= declared.keys():
        return f"it takes {', '.join(sorted(taken - declared.keys()))}, a size that only the data tells"
    if _sums_over_nothing(piece):
        return NOTHING_TO_GAIN
    for name, (lower, upper) in size_ranges(piece.examples).items():
        if size < lower or (upper is not None and size > upper):
            return f"{declared[name]} is {'at least ' if upper is None else f'at most {upper} and at least '}{lower}"
    for condition in conditions:
        if condition.symbols <= taken and condition.is_broken_by(dict.fromkeys(taken, size)):
            return f"the model's code relies on {condition.named(declared)}"
    return None


def choose_static(
    symbols: Sequence[frozenset[str]], available: Mapping[tuple[int, int], Any], sizes: Mapping[str, int]
) -> tuple[int | None, ...]:
    """For each unique piece the size whose static piece runs at these sizes (symbol to number), or None.

    A static piece runs only where every size the piece takes is exactly its size.
    """
    chosen: list[int | None] = []
    for index, taken in enumerate(symbols):
        found = {sizes.get(symbol) for symbol in taken}
        size = found.pop() if len(found) == 1 else None
        chosen.append(size if size is not None and (index, size) in available else None)
    return tuple(chosen)
