"""The interface of a pass: a frozen value that names itself, rewrites a graph and reports its matches and misses."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import fx

from piecegraph.passes.matching.identity import uuid_of


class Place(enum.Enum):
    """The stage of compilation at which a pass works."""

    TRACED = "traced"
    """The whole traced graph, in torch IR as Dynamo writes it, before it is cut. A pass may look across split ops and
    widen what they do."""

    PIECE = "piece"
    """The graph of one piece, in torch IR, after the cut. Equal pieces get equal graphs, so a pass that looks at
    nothing but its graph leaves them equal."""

    POST_GRAD = "post-grad"
    """The ATen graph of one unique piece, inside Inductor (its `post_grad_custom_post_pass`): functional but for
    copies into inputs at the end. Values are under `meta["val"]`. Not with `compiler="eager"`."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A site that looked like a match and was not."""

    node: str  # the node's name in the graph
    reason: str  # what stands in the way: a dtype, a second reader, a shape
    line: str = ""  # of the model's code, as "file:line (code)"; the compiler fills it in


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass. The pass changed the graph if and only if `matches` is more than 0."""

    matches: int = 0
    misses: tuple[Miss, ...] = ()  # in the graph's order


class PassContext(Protocol):
    """The questions that a pass may ask about its graph, and what it may request of the compiler."""

    def is_split_op(self, node: fx.Node) -> bool:
        """Return whether the graph is cut at this node."""

    def is_weight(self, node: fx.Node) -> bool:
        """Return whether a placeholder is a parameter that owns its memory and may become part of another tensor."""

    def concatenated(self, weights: Sequence[fx.Node]) -> fx.Node:
        """Return a placeholder for the tensors of `weights`, concatenated along dim 0.

        `is_weight` holds for each of `weights`. The pass erases those it no longer reads. Their tensors become views of
        the new one, so memory does not grow.
        """


class GraphPass(ABC):
    """A pass. Subclasses are frozen dataclasses whose options are fields, so that repr, report and cache key agree."""

    name: ClassVar[str]
    place: ClassVar[Place] = Place.TRACED

    replaces_split_ops: ClassVar[bool] = False
    """If True, the pass replaces split ops by others, one for one. Otherwise the split ops of a graph must stay, in
    order."""

    reads: ClassVar[tuple[str, ...]] = ()
    """The names of modules whose source decides what the pass does, besides those of its class and its bases. A change
    in one of them changes the pass's cache key."""

    @abstractmethod
    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        """Rewrite `graph` in place.

        Nodes carry what they compute as `meta["example_value"]` (a fake tensor, a SymInt, None; `meta["val"]`
        after Inductor's own passes), and placeholders do so at once; other new nodes need not, the compiler
        computes theirs when the pass is done. It also lints.

        A pass is undone that raises; that leaves a graph which does not lint or compute; that changes the
        number of outputs or one's dtype, shape or device; that erases an input that is not a weight; that loses
        or adds a split op (`replaces_split_ops`); or whose result does not say what it did.
        """

    def uuid(self) -> str:
        """Return the hex digest that identifies the pass in cache keys: of its class, source and options."""
        return uuid_of(self)
