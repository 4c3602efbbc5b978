"""Nodes of one block of a captured graph as those of another: the same kernels, over other weights and caches."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from piecegraph.compiler.graphs.graph_editor import Content, CopyFailed, Edge, GraphEditor, MemsetContent, NotCopied

_WORD = struct.Struct("<Q")


class Memory(NamedTuple):
    """From a tensor's first number to behind its last."""

    begin: int  # an address
    end: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Memory:
        num_numbers = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return cls(x.data_ptr(), x.data_ptr() + (x.element_size() * num_numbers if x.numel() else 1))


class Spans:
    """Memory of some tensors, those that overlap as one."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._of_memory = [0] * len(memories)
        for (begin, end), number in sorted((memory, number) for number, memory in enumerate(memories)):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)
            self._of_memory[number] = len(self._begins) - 1

    def find(self, address: int) -> int | None:
        """The span an address is in."""
        span = bisect_right(self._begins, address) - 1
        return span if span >= 0 and address < self._ends[span] else None

    def moves_to(self, memories: Sequence[Memory]) -> Moves:
        """To that of as many others, alike in all but their numbers and where they are. Raises `NotCopied` where
        tensors that share memory become some that share it in another way."""
        shifts: list[int | None] = [None] * len(self._begins)
        for span, old, new in zip(self._of_memory, self._memories, memories, strict=True):
            shift = new.begin - old.begin
            if shifts[span] not in (None, shift):
                raise NotCopied("tensors of a layer share memory, and those of another do so in another way")
            shifts[span] = shift
        return Moves(self, [shift or 0 for shift in shifts])


@dataclass(frozen=True, slots=True)
class Moves:
    """How far each span's addresses are moved, in bytes."""

    spans: Spans
    shifts: Sequence[int]

    def __call__(self, address: int) -> int:
        """Where it is moved to; an address that is in none of the spans, and any other number, stays."""
        span = self.spans.find(address)
        return address if span is None else address + self.shifts[span]


class Wait(NamedTuple):
    """What a node waits for, told so that it holds in every block."""

    block: int  # 0: the node's own, 1: the one ahead; -1: none, `node` is the handle
    node: int  # place in the block
    kind: bytes


@dataclass(frozen=True, slots=True)
class BlockNodes:
    """What a block's steps added to the graph."""

    handles: tuple[int, ...]
    contents: tuple[Content, ...]
    waits: tuple[tuple[Wait, ...], ...]  # of each node, sorted
    frontier: tuple[Wait, ...]  # for which the next block's first ones wait

    @classmethod
    def read(cls, editor: GraphEditor, handles: Sequence[int], ahead: Sequence[int]) -> BlockNodes:
        """`ahead`: the nodes of the block before. Raises `NotCopied` for a node that cannot be copied."""
        places = {handle: (1, place) for place, handle in enumerate(ahead)}
        places.update({handle: (0, place) for place, handle in enumerate(handles)})

        def told(edges: Sequence[Edge]) -> tuple[Wait, ...]:
            return tuple(sorted(Wait(*places.get(node, (-1, node)), kind) for node, kind in edges))

        return cls(
            handles=tuple(handles),
            contents=tuple(editor.read(handle) for handle in handles),
            waits=tuple(told(editor.waits_for(handle)) for handle in handles),
            frontier=told(editor.frontier()),
        )


class Block(NamedTuple):
    """A block that ran."""

    nodes: BlockNodes
    memories: Sequence[Memory]  # of the tensors that other blocks have others of


class _Pointer(NamedTuple):
    """One that a node is given."""

    offset: int  # in bytes, in a kernel's parameters
    address: int
    span: int


@dataclass(frozen=True, slots=True)
class Template:
    """A block's nodes, to be copied to blocks that have other tensors."""

    nodes: BlockNodes
    spans: Spans  # of its tensors
    pointers: Sequence[Sequence[_Pointer]]  # of each node
    same: frozenset[int]  # spans that both of the blocks it was made of have

    @classmethod
    def of(cls, earlier: Block, later: Block) -> Template | str:
        """`later`, if it differs from `earlier` by nothing but addresses of its tensors, each as far from the other's
        as the tensors are; else what else differs.

        So a number is a pointer because it was another, and the right one, in another block: among what kernels are
        given there are numbers that look like addresses, two small ones side by side for instance.
        """
        if len(earlier.nodes.handles) != len(later.nodes.handles):
            return f"one layer is {len(earlier.nodes.handles)} nodes and another {len(later.nodes.handles)}"
        if earlier.nodes.waits != later.nodes.waits or earlier.nodes.frontier != later.nodes.frontier:
            return "the nodes of two layers wait for others in different ways"
        spans = Spans(later.memories)
        back = spans.moves_to(earlier.memories)
        pointers = []
        for place, (old, new) in enumerate(zip(earlier.nodes.contents, later.nodes.contents, strict=True)):
            found = _pointers(old, new, back)
            if found is None:
                return f"node {place} of a layer differs from another's by more than its weights and cache"
            pointers.append(found)
        same = frozenset(span for span, shift in enumerate(back.shifts) if shift == 0)
        return cls(later.nodes, spans, pointers, same)

    def moves_to(self, memories: Sequence[Memory]) -> Moves:
        """Raises `NotCopied` (`Spans.moves_to`), also where the two blocks this was made of share a tensor, so that
        nobody knows where its address is given, and this one has another."""
        moves = self.spans.moves_to(memories)
        if any(moves.shifts[span] for span in self.same):
            raise NotCopied("two layers share a tensor, and another has one of its own")
        return moves

    def check_copy(self, editor: GraphEditor, handles: Sequence[int], ahead: Sequence[int], moves: Moves) -> None:
        """Raises `CopyFailed` if the graph does not have the copy as it was asked for."""
        copy = BlockNodes.read(editor, handles, ahead)
        wanted = tuple(map(self._moved, self.nodes.contents, self.pointers, [moves.shifts] * len(handles)))
        if (copy.contents, copy.waits, copy.frontier) != (wanted, self.nodes.waits, self.nodes.frontier):
            raise CopyFailed("the driver made other nodes than it was asked to copy")

    @staticmethod
    def _moved(content: Content, pointers: Sequence[_Pointer], shifts: Sequence[int]) -> Content:
        """The same launch over other memory."""
        if isinstance(content, MemsetContent):
            return content._replace(address=content.address + sum(shifts[span] for _, _, span in pointers))
        parameters = bytearray(content.parameters)
        for offset, address, span in pointers:
            _WORD.pack_into(parameters, offset, address + shifts[span])
        return content._replace(parameters=bytes(parameters))


class Copier:
    """Adds a template's nodes to their graph, once for each block that is to be a copy."""

    def __init__(self, template: Template, editor: GraphEditor) -> None:
        nodes = template.nodes
        self._editor = editor
        self._makers = tuple(
            (editor.maker(content, like), pointers)
            for content, like, pointers in zip(nodes.contents, nodes.handles, template.pointers, strict=True)
        )
        by_kind: dict[bytes, list[tuple[Wait, int]]] = {}
        for place, waits in enumerate(nodes.waits):
            for wait in waits:
                by_kind.setdefault(wait.kind, []).append((wait, place))
        self._edges = tuple(
            (kind, [wait for wait, _ in each], [place for _, place in each]) for kind, each in by_kind.items()
        )
        self._frontier = nodes.frontier

    def add(self, moves: Moves, ahead: Sequence[int]) -> tuple[int, ...]:
        """The nodes once more, over memory that is moved, behind those of the block `ahead`: their handles. What the
        stream captures next waits for them."""
        shifts = moves.shifts
        handles = tuple(
            [
                maker.add([(offset, address + shifts[span]) for offset, address, span in pointers])
                for maker, pointers in self._makers
            ]
        )
        found = (handles, ahead)
        for kind, waits, places in self._edges:
            self._editor.connect(kind, _waited_for(waits, found), [handles[place] for place in places])
        frontier = self._frontier
        kinds = [wait.kind for wait in frontier]
        self._editor.set_frontier(list(zip(_waited_for(frontier, found), kinds, strict=True)))
        return handles


def _waited_for(waits: Sequence[Wait], blocks: tuple[Sequence[int], Sequence[int]]) -> list[int]:
    """Handles. `blocks`: of a block's own nodes, and of those of the block ahead."""
    return [node if block < 0 else blocks[block][node] for block, node, _ in waits]


def _pointers(old: Content, new: Content, back: Moves) -> list[_Pointer] | None:
    """Those in which two nodes differ, if all that differs is `new`'s addresses moved `back`; else None.

    A kernel's are words of eight bytes, also within what it takes as a structure (a tensor map of TMA begins with one).
    """
    if isinstance(old, MemsetContent) or isinstance(new, MemsetContent):
        if not (isinstance(old, MemsetContent) and isinstance(new, MemsetContent)):
            return None
        words, is_like = [(0, old.address, new.address)], old._replace(address=0) == new._replace(address=0)
    else:
        size = len(new.parameters)
        whole = size // 8 * 8
        is_like = old._replace(parameters=old.parameters[whole:]) == new._replace(parameters=new.parameters[whole:])
        is_like = is_like and len(old.parameters) == size
        words = []
        if is_like and old.parameters != new.parameters:
            words = [
                (offset, _WORD.unpack_from(old.parameters, offset)[0], _WORD.unpack_from(new.parameters, offset)[0])
                for offset in range(0, whole, 8)
            ]
    found: list[_Pointer] = []
    for offset, word, new_word in words:
        if word != new_word:
            span = back.spans.find(new_word)
            if span is None or new_word + back.shifts[span] != word:
                return None
            found.append(_Pointer(offset, new_word, span))
    return found if is_like else None
