"""Static pieces: unique pieces with every size fixed to one number, their selection and their keys."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.report import NOTHING_TO_GAIN
from piecegraph.compiler.common.size_conditions import SizeCondition
from piecegraph.compiler.common.split_ops import op_name
from piecegraph.compiler.common.symbolic_sizes import size_ranges
from piecegraph.compiler.splitting.normalize import symbols_of
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.split import Piece
from piecegraph.passes.matching.effects import view_source


@dataclass(frozen=True, kw_only=True)
class StaticPiece:
    """A unique piece with every size that it takes fixed to `size`."""

    piece: UniquePiece
    size: int
    symbols: frozenset[str]

    @cached_property
    def key(self) -> str:
        """The sha256 of the dynamic piece's canonical text and the size, in hex."""
        return hashlib.sha256(f"{self.piece.text}\nevery size is {self.size}".encode()).hexdigest()

    @property
    def sizes(self) -> dict[str, int]:
        """The number that each symbol of the piece stands for."""
        return dict.fromkeys(sorted(self.symbols), self.size)

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        """The positions of the dynamic piece's inputs that the static piece takes: all tensors."""
        return tuple(i for i, value in enumerate(self.piece.examples) if isinstance(value, torch.Tensor))


@dataclass(frozen=True, slots=True)
class Refused:
    """A unique piece that stays dynamic at a size, with the reason."""

    unique: int
    size: int
    reason: str


def symbols_by_unique(unique: Sequence[UniquePiece], pieces: Sequence[Piece]) -> tuple[frozenset[str], ...]:
    """Return, for each unique piece, the symbols of its sizes in all places of the model where it runs."""
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
    """Return a static piece per size and unique piece that gains by it, ordered by size, and the refused ones.

    A piece can gain if it takes sizes and does not only call ops of passes, which see the sizes of each call anyway.
    `symbols` comes from `symbols_by_unique`; `declared` maps the symbols that a call determines to their names;
    `conditions` hold for every call. Refused are pieces that take other symbols or that only compute elementwise, and
    sizes that no call can have.
    """
    made: list[StaticPiece] = []
    refused: list[Refused] = []
    for size in sizes:
        for piece, taken in zip(unique, symbols, strict=True):
            if not taken or _leaves_sizes_to_ops(piece):
                continue  # the static piece would equal the dynamic one
            reason = _reason_to_refuse(piece, taken, size, declared, conditions)
            if reason is None:
                made.append(StaticPiece(piece=piece, size=size, symbols=taken))
            else:
                refused.append(Refused(piece.index, size, reason))
    return tuple(made), tuple(refused)


def gains_by_static_size(piece: UniquePiece) -> bool:
    """Return whether `static_pieces` makes a static piece of `piece`, given that `piece` takes sizes."""
    return not _is_elementwise(piece)


def _leaves_sizes_to_ops(piece: UniquePiece) -> bool:
    return all(map(_is_left_to_ops, _calls(piece)))


def _is_elementwise(piece: UniquePiece) -> bool:
    """Return whether everything that is not left to ops is known to be elementwise (no reduction)."""
    return all(_is_left_to_ops(node) or _name(node) in ELEMENTWISE for node in _calls(piece))


def _calls(piece: UniquePiece) -> list[fx.Node]:
    return [node for node in piece.graph_module.graph.nodes if node.op in ("call_function", "call_method")]


ELEMENTWISE = frozenset(
    "abs add and_ cat clamp clone contiguous copy_ cos detach div empty_like embedding eq exp float full_like ge gelu "
    "getitem gt half index_select le log lt masked_fill mul ne neg new_zeros or_ pow reciprocal relu repeat rsqrt rsub "
    "sigmoid silu sin softplus sqrt stack sub tanh to truediv type type_as unsqueeze where zeros_like bfloat16".split()
)
"""The names of elementwise functions and methods."""


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_left_to_ops(node: fx.Node) -> bool:
    """Return whether `node` is an op of a pass, an item of its results, a view, or new memory."""
    return (
        op_name(node.target).startswith("piecegraph::")
        or node.target in ("new_empty", operator.getitem)
        or view_source(node) is not None
    )


def _reason_to_refuse(
    piece: UniquePiece,
    taken: frozenset[str],
    size: int,
    declared: Mapping[str, str],
    conditions: Sequence[SizeCondition],
) -> str | None:
    if piece.shares_memory:
        return "its inputs or outputs share memory that is written"
    if not taken <= declared.keys():
        return f"it takes {', '.join(sorted(taken - declared.keys()))}, a size that depends on the data"
    if _is_elementwise(piece):
        return NOTHING_TO_GAIN
    for name, (lower, upper) in size_ranges(piece.examples).items():
        if size < lower or (upper is not None and size > upper):
            return f"{declared[name]} is {'at least ' if upper is None else f'at most {upper} and at least '}{lower}"
    for condition in conditions:
        if condition.symbols <= taken and condition.is_violated_by(dict.fromkeys(taken, size)):
            return f"the model's code relies on {condition.with_size_names(declared)}"
    return None


def choose_static(
    symbols: Sequence[frozenset[str]], available: Mapping[tuple[int, int], Any], sizes: Mapping[str, int]
) -> tuple[int | None, ...]:
    """Return for each unique piece the size whose static piece runs at `sizes` (symbol to number), or None.

    A static piece runs only where every size that the piece takes equals its size.
    """
    chosen: list[int | None] = []
    for index, taken in enumerate(symbols):
        found = {sizes.get(symbol) for symbol in taken}
        size = found.pop() if len(found) == 1 else None
        chosen.append(size if size is not None and (index, size) in available else None)
    return tuple(chosen)
