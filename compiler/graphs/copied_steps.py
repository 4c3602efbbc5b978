"""A plan's steps while they are captured: of blocks that repeat the first few run, and copies of their nodes stand for
the others.

A model's layers launch the same kernels over other weights and caches. To run one in Python for each graph takes a
millisecond; to copy its nodes, with the other layer's addresses in place of its own, takes a tenth. That a copy is
what running would have given is not assumed: the nodes of a layer that ran are compared, to the last byte, with what
copying those of the one ahead would have made of them, and where anything differs all layers run.

Source: CUDA Driver API, "Graph Management" (`graph_editor.py`).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.bound_plan import Bound, Values, arguments_of
from piecegraph.compiler.graphs.copied_nodes import Block, BlockNodes, Copier, Memory, Template
from piecegraph.compiler.graphs.cuda_graph import alias_without_ownership
from piecegraph.compiler.graphs.graph_editor import (
    CapturedGraphEditor,
    CopyFailed,
    GraphEditor,
    NotCopied,
    editing_unavailable_reason,
)
from piecegraph.compiler.graphs.known_blocks import Copied, Described, Fact, known_blocks
from piecegraph.compiler.graphs.prepared_ops import Kind, MovablePatch, Patch, prepared_ops
from piecegraph.compiler.graphs.step_kinds import kinds_of
from piecegraph.compiler.plan import CallStep, Step
from piecegraph.compiler.repeated_steps import Repeat
from piecegraph.errors import CaptureError

MAX_DISTANCE = 3
"""Blocks after which memory is handed out alike again: one layer's results may be where the one before last had its."""

MAX_RUN = 8
"""Blocks that run in vain, at most. In a pool that begins as one stretch two to five do before one is like another."""

RunStep = Callable[[int, Step, Values], Patch | None]
"""Runs one step of the plan. Returns how its nodes are changed before replays, if they are."""


def call_with_copies(compiled: CompiledModel, *args: Any) -> Any:
    """`compiled(*args)`; where a CUDA graph is captured, with copies of what repeats. Its result's numbers are there
    after a replay, as those of any call that is captured."""
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return compiled(*args)
    bound = Bound.of(compiled.parts(args), prepared_ops={})
    steps = tuple(enumerate(bound.plan.steps))
    values = bound.start()
    with torch.no_grad():
        run_steps(bound, steps, values, bound.run, copies_of(bound, steps))
        return bound.finish(values)


def copies_of(bound: Bound, steps: Sequence[tuple[int, Step]]) -> Copies | None:
    """Of the blocks that repeat among these steps, on the current stream, which captures; None where none do."""
    repeat = bound.repeat
    if repeat is None or not steps or not known_blocks().may_copy:
        return None
    if not steps[0][0] <= repeat.first < repeat.end <= steps[-1][0] + 1:
        return None
    reason, editor = editing_unavailable_reason(), None
    if reason is None:
        try:
            editor = CapturedGraphEditor(torch.cuda.current_stream().cuda_stream)
        except CaptureError as error:
            reason = str(error)
    complete = {op: prepared for op, prepared in prepared_ops().items() if prepared.may_copy}
    return Copies(bound, repeat, editor, kinds_of(complete), reason)


def run_steps(
    bound: Bound, steps: Sequence[tuple[int, Step]], values: Values, run: RunStep, copies: Copies | None
) -> list[Patch]:
    """Run steps of the plan over `values`, which lose what no later step reads, except for those that are copied."""
    patches: list[Patch] = []
    copied_to = -1
    for number, step in steps:
        if number < copied_to:
            continue
        if copies is not None:
            copied_to = copies.copy_from(number, values, patches)
            if number < copied_to:
                continue
            copies.note(number, step, values)
        patch = run(number, step, values)
        if patch is not None:
            patches.append(patch)
        bound.lifetimes.drop_after(number, values)
    if copies is not None:
        copies.tell()
    return patches


@dataclass(slots=True)
class _Block:
    """One that ran, or is to be copied."""

    kinds: list[Hashable]  # of what differs from block to block, in the order it is read
    memories: list[Memory]  # of the tensors among that
    nodes: BlockNodes | None = None
    patches: Sequence[Patch] = ()
    made: list[Memory] = field(default_factory=list)  # of what blocks made and a split op of this one reads

    def add(self, value: Described) -> None:
        self.kinds.append(value.kind)
        if value.memory is not None:
            self.memories.append(value.memory)


class Copies:
    """Copies blocks of one recording as soon as those that ran show how."""

    def __init__(
        self,
        bound: Bound,
        repeat: Repeat,
        editor: GraphEditor | None,
        kinds: Mapping[str, Kind],
        reason: str | None = None,
    ) -> None:
        self._bound = bound
        self._repeat = repeat
        self._editor = editor
        self._kinds = kinds
        self._known = known_blocks()
        self._bound_names = {slot.name for slot in bound.plan.bound}
        self._reason = reason or "too few layers are alike"
        self._num_copied = 0
        self._is_done = editor is None
        self._blocks: list[_Block] = []
        self._num_patches = 0
        self._nodes: Sequence[int] = ()
        self._inputs = self._known.inputs(bound.plan, repeat)
        self._computed: dict[str, Described] = {}  # by name: ahead of all blocks, for this bucket
        self._aliases: dict[str, Any] = {}  # of what blocks made and a split op reads: memory that nobody keeps
        self._aliased: dict[int, Described] = {}  # of those, by id

    def copy_from(self, number: int, values: Values, patches: list[Patch]) -> int:
        """The step to go on with: `number`, or that behind the blocks that were copied."""
        block = self._repeat.block_at(number)
        if self._is_done or block is None:
            return number
        assert self._editor is not None
        try:
            self._end_block(self._editor, patches)
            templates = self._templates()
            self._is_done = bool(templates) or block >= MAX_RUN or block == self._repeat.count
            if not templates:
                self._blocks.append(_Block([], []))
                return number
            num_blocks = (self._repeat.count - block) // len(templates) * len(templates)
            if num_blocks:
                self._copy(self._editor, block, templates, num_blocks, values, patches)
                self._num_copied = num_blocks
        except CopyFailed:
            raise
        except (NotCopied, CaptureError) as error:  # the driver's, where it only read
            self._is_done, self._reason = True, str(error)
        return number + self._num_copied * self._repeat.period

    def note(self, number: int, step: Step, values: Values) -> None:
        """A step is about to run."""
        if self._is_done or not self._repeat.first <= number < self._repeat.end:
            return
        if isinstance(step, CallStep):
            for name in self._inputs.all(number):
                if name in self._inputs.made:
                    alias = self._aliases[name] = _alias(values[name])
                    self._aliased[id(alias)] = Described.of(alias)
        try:
            described = self._block(self._facts(number, step, self._aliases, values), self._aliases, values)
            self._blocks[-1].kinds += described.kinds
            self._blocks[-1].memories += described.memories
            self._blocks[-1].made += described.made
        except NotCopied as error:
            self._is_done, self._reason = True, str(error)

    def tell(self) -> None:
        """How it went, to the capture that this is part of (`KnownBlocks.told`)."""
        reason = None if self._num_copied else self._reason
        self._known.told.append(Copied(self._num_copied, self._repeat.count, reason))

    def _end_block(self, editor: GraphEditor, patches: Sequence[Patch]) -> None:
        """What the block that just ran added to the graph."""
        nodes = editor.nodes()
        if self._blocks:
            block = self._blocks[-1]
            known = set(self._nodes)
            ahead = self._blocks[-2].nodes if len(self._blocks) > 1 else None
            handles = [node for node in nodes if node not in known]
            block.nodes = BlockNodes.read(editor, handles, ahead.handles if ahead is not None else ())
            block.patches = tuple(patches[self._num_patches :])
        self._nodes, self._num_patches = nodes, len(patches)

    def _templates(self) -> list[Template]:
        """What the next blocks are copies of, in turns, by those that ran; none if that is not known yet."""
        for distance in range(1, MAX_DISTANCE + 1):
            if len(self._blocks) > 2 * distance:
                found = [self._template(len(self._blocks) - back, distance) for back in range(distance, 0, -1)]
                if None not in found:
                    return [template for template in found if template is not None]
        return []

    def _template(self, number: int, distance: int) -> Template | None:
        earlier, later = self._blocks[number - distance], self._blocks[number]
        if earlier.kinds != later.kinds:
            self._reason = "the weights of two layers differ in how they lie in memory"
            return None
        if earlier.made != later.made:
            self._reason = "what one layer made for the next is not where another's is"
            return None
        assert earlier.nodes is not None and later.nodes is not None
        found = Template.of(Block(earlier.nodes, earlier.memories), Block(later.nodes, later.memories))
        if isinstance(found, str):
            self._reason = found
            return None
        return found

    def _copy(
        self,
        editor: GraphEditor,
        begin: int,
        templates: Sequence[Template],
        num_blocks: int,
        values: Values,
        patches: list[Patch],
    ) -> None:
        """The blocks from `begin` on, each of the one that ran as it would."""
        distance = len(templates)
        ran = self._blocks[-distance:]
        described = self._described(begin, num_blocks, distance, values)
        for n, block in enumerate(described):
            if block.kinds != ran[n % distance].kinds:
                raise NotCopied("the weights of two layers differ in how they lie in memory")
        kinds = [block.kinds for block in (*self._blocks[1:], *described)]
        self._known.are_alike = begin + num_blocks == self._repeat.count and all(each == kinds[0] for each in kinds)
        moves = [templates[n % distance].moves_to(block.memories) for n, block in enumerate(described)]
        movable = [patch for block in ran for patch in block.patches]
        if not all(isinstance(patch, MovablePatch) for patch in movable):
            raise NotCopied("a split op's nodes cannot be changed in a copy")
        ahead: Sequence[int] = templates[-1].nodes.handles
        try:
            copiers = [Copier(template, editor) for template in templates]
            for n, moved in enumerate(moves):
                template, block = templates[n % distance], ran[n % distance]
                handles = copiers[n % distance].add(moved, ahead)
                if n < distance:
                    template.check_copy(editor, handles, ahead, moved)
                nodes = dict(zip(template.nodes.handles, handles, strict=True))
                patches += [patch.moved(nodes, moved) for patch in block.patches if isinstance(patch, MovablePatch)]
                ahead = handles
        except CopyFailed:
            raise
        except (NotCopied, CaptureError) as error:  # too late to run these blocks
            raise CopyFailed(str(error)) from error
        self._bound.skip_blocks(begin - 1, begin + num_blocks - 1, values)

    def _described(self, begin: int, num_blocks: int, distance: int, values: Values) -> list[_Block]:
        """The blocks from `begin` on, which do not run. What their steps read of blocks is where those that ran had it.

        What a recording before this one found of them is taken, if it is still so for the last of them.
        """
        rans = [begin - distance + n % distance for n in range(num_blocks)]
        last = begin + num_blocks - 1
        if self._known.blocks.get(last) != self._facts_of(last, rans[-1], values):
            self._known.blocks.clear()
        blocks = []
        for number, ran in zip(range(begin, begin + num_blocks), rans, strict=True):
            facts = self._known.blocks.get(number)
            if facts is None:
                facts = self._known.blocks[number] = self._facts_of(number, ran, values)
            blocks.append(self._block(facts, self._aliases_in(number, ran), values))
        return blocks

    def _aliases_in(self, number: int, ran: int) -> dict[str, Any]:
        """Of what block `number` reads of blocks, by its names."""
        return {
            mine: self._aliases[its] for mine, its in self._inputs.of_split_ops(number, ran) if its in self._aliases
        }

    def _facts_of(self, number: int, ran: int, values: Values) -> list[Fact]:
        first, period = self._repeat.first, self._repeat.period
        aliases = self._aliases_in(number, ran)
        steps = range(first + number * period, first + (number + 1) * period)
        return [fact for at in steps for fact in self._facts(at, self._bound.plan.steps[at], aliases, values)]

    def _facts(self, number: int, step: Step, aliases: Mapping[str, Any], values: Values) -> list[Fact]:
        """What of a step differs from block to block."""
        if not isinstance(step, CallStep) or not step.is_split_op:
            return [
                self._known.describe(values[name], stays=True) if name in self._bound_names else name
                for name in self._inputs.given(number)
            ]
        if step.op not in self._kinds:
            raise NotCopied(f"{step.op} was registered without a kind that tells its tensors and numbers (may_copy)")
        args, kwargs = arguments_of(step, ChainMap(dict(aliases), values))
        computed = {name: values[name] for name in self._inputs.given(number) if name not in self._bound_names}
        names = {id(x): name for name, x in (*aliases.items(), *computed.items()) if isinstance(x, torch.Tensor)}
        leaves = _leaves(self._kinds[step.op](*args, **kwargs))
        return [names[id(leaf)] if id(leaf) in names else self._known.describe(leaf) for leaf in leaves]

    def _block(self, facts: Sequence[Fact], aliases: Mapping[str, Any], values: Values) -> _Block:
        block = _Block([], [])
        for fact in facts:
            if isinstance(fact, str) and fact in aliases:
                alias = self._aliased[id(aliases[fact])]
                block.add(alias)
                block.made += [] if alias.memory is None else [alias.memory]
            elif isinstance(fact, str):
                if fact not in self._computed:
                    self._computed[fact] = Described.of(values[fact])
                block.add(self._computed[fact])
            else:
                block.add(fact)
        return block


def _alias(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor) and value.device.type == "cuda"
    return alias_without_ownership(value) if is_tensor else value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
