"""What a pass is: a frozen value that names itself and rewrites a graph, and says how often it did."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import fx

from piecegraph.passes.identity import uuid_of


class Place(enum.Enum):
    """Where in compiling a pass works."""

    TRACED = "traced"
    """The whole traced graph, torch IR as Dynamo writes it, before it is cut: a pass may look across split ops
    and widen what they do."""

    PIECE = "piece"
    """The graph of one piece, torch IR, after the cut. Equal pieces get equal graphs, so a pass that looks at
    nothing but its graph leaves them equal."""

    POST_GRAD = "post-grad"
    """The ATen graph of one unique piece, inside Inductor (its `post_grad_custom_post_pass`): functional but for
    copies into inputs at the end. Values are under `meta["val"]`. Not with `compiler="eager"`."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A place that looked like a match and was not."""

    node: str  # the node's name in the graph
    reason: str  # what stands in the way: a dtype, a second reader, a shape
    line: str = ""  # of the model's code, as "file:line (code)"; the compiler fills it in


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did to a graph. It changed nothing if `matches` is 0, and something if it is more."""

    matches: int = 0
    misses: tuple[Miss, ...] = ()  # in the graph's order


class PassContext(Protocol):
    """What a pass may ask about the graph it is given, and what it may want of the compiler."""

    def is_split_op(self, node: fx.Node) -> bool:
        """The graph is cut at this node."""

    def is_weight(self, node: fx.Node) -> bool:
        """A placeholder that is a parameter with its memory to itself: it may become part of another tensor."""

    def concatenated(self, weights: Sequence[fx.Node]) -> fx.Node:
        """A placeholder that takes the place of several, for which `is_weight` holds: their tensors, one after
        the other along dim 0. The pass erases those it no longer reads; their tensors become views of the new
        one, so memory does not grow."""


class GraphPass(ABC):
    """Subclasses are frozen dataclasses; their options are fields, so that repr, report and cache key agree."""

    name: ClassVar[str]
    place: ClassVar[Place] = Place.TRACED

    replaces_split_ops: ClassVar[bool] = False
    """It puts other split ops in the place of those it finds, one for one. Without this the split ops of a graph
    must stay what they are, in order."""

    reads: ClassVar[tuple[str, ...]] = ()
    """Modules, by name, whose source decides what the pass does, beside those of its class and its bases: a
    change there is another pass to every cache."""

    @abstractmethod
    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        """Rewrite `graph` in place.

        Nodes carry what they compute as `meta["example_value"]` (a fake tensor, a SymInt, None; `meta["val"]`
        after Inductor's own passes), and placeholders do so at once; other new nodes need not, the compiler
        computes theirs when the pass is done. It also lints.

        A pass is undone that raises; that leaves a graph which does not lint or compute; that changes the
        number of outputs or one's dtype, shape or device; that erases an input which is no weight; that loses
        or adds a split op (`replaces_split_ops`); or whose result does not say what it did.
        """

    def uuid(self) -> str:
        """What tells this pass from every other to a cache: its class, source and options, as hex."""
        return uuid_of(self)
