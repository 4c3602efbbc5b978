"""What a pass is: a frozen value that names itself and rewrites a graph, and says how often it did."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import fx


class Place(enum.Enum):
    """Where in compiling a pass works."""

    TRACED = "traced"
    """The whole traced graph, torch IR as Dynamo writes it, before it is cut: a pass may look across split ops
    and widen what they do."""

    PIECE = "piece"
    """The graph of one unique piece, torch IR, after the cut."""

    POST_GRAD = "post-grad"
    """The ATen graph of one unique piece, inside Inductor, functional and with its layouts decided."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A place that looked like a match and was not."""

    node: str  # the node's name in the graph
    reason: str  # what stands in the way: a dtype, a second reader, a shape


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did to a graph. It changed nothing if `matches` is 0."""

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

    @abstractmethod
    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        """Rewrite `graph` in place.

        Nodes carry what they compute as `meta["example_value"]` (a fake tensor, a SymInt, None), and
        placeholders do so at once; other new nodes need not, the compiler computes theirs when the pass is
        done. It also lints. A pass that raises, or that changes the graph's outputs, is undone.
        """
