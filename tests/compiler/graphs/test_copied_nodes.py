"""A layer's nodes as another's: the same as if that had been recorded, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from piecegraph.compiler.graphs.copied_nodes import Block, BlockNodes, Copier, Memory, Spans, Template
from piecegraph.compiler.graphs.graph_editor import CopyFailed, KernelContent, MemsetContent, NotCopied
from tests.compiler.graphs.fake_graph import EARLY, PLAIN, FakeGraph, kernel

STATE, SCRATCH = 0x9000_0000, 0x9100_0000
LOOKS_LIKE_AN_ADDRESS = 0x4_0000_0020
"""4 and 32 side by side. It is within the weights of one layer."""


def weights_of(layer: int) -> list[Memory]:
    """A weight, and a cache's keys and values, which lie in turns."""
    begin = 0x4_0000_0000 + layer * 0x1000
    cache = 0x7_0000_0000 + layer * 0x800
    return [Memory(begin, begin + 0x1000), Memory(cache, cache + 0x1_0000), Memory(cache + 0x100, cache + 0x1_0100)]


def launch_layer(graph: FakeGraph, memories: list[Memory], function: int = 7) -> list[int]:
    """Four nodes, one of them on a branch of its own."""
    weight, keys, values = (memory.begin for memory in memories)
    clear = graph.launch(MemsetContent(keys + 8, 0, 0, 4, 16, 1), PLAIN)
    project = graph.launch(kernel(weight + 0x10, STATE, LOOKS_LIKE_AN_ADDRESS, SCRATCH, function=function))
    attend = graph.launch(kernel(keys, values, SCRATCH, grid=8))
    graph.front = [(clear, PLAIN), (project, PLAIN)]
    beside = graph.launch(kernel(5, STATE))
    graph.front = [(attend, PLAIN), (beside, PLAIN)]
    return [clear, project, attend, beside]


def blocks_of(graph: FakeGraph, layers: int, **options: int) -> list[Block]:
    graph.launch(kernel(1))
    blocks: list[Block] = []
    ahead: list[int] = []
    for layer in range(layers):
        handles = launch_layer(graph, weights_of(layer), **(options if layer == layers - 1 else {}))
        blocks.append(Block(BlockNodes.read(graph, handles, ahead), weights_of(layer)))
        ahead = handles
    return blocks


def template_of(earlier: Block, later: Block) -> Template:
    found = Template.of(earlier, later)
    assert isinstance(found, Template), found
    return found


def test_copies_are_what_recording_would_have_given() -> None:
    recorded, copied = FakeGraph(), FakeGraph()
    blocks_of(recorded, 7)
    blocks = blocks_of(copied, 3)
    template = template_of(*blocks[1:])
    copier = Copier(template, copied)
    ahead = blocks[2].nodes.handles
    for layer in range(3, 7):
        moves = template.moves_to(weights_of(layer))
        handles = copier.add(moves, ahead)
        template.check_copy(copied, handles, ahead, moves)
        assert [copied.copies[handle] for handle in handles] == list(blocks[2].nodes.handles)
        ahead = handles
    assert copied.whole() == recorded.whole()
    for graph in (copied, recorded):
        graph.launch(kernel(2))
    assert copied.whole() == recorded.whole()


def changed(content: KernelContent, **fields: object) -> KernelContent:
    return content._replace(**fields)  # type: ignore[arg-type]  # values by name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda graph: blocks_of(graph, 3, function=8), "node 1 of a layer differs"),
        (lambda graph: _with_a_scalar(graph), "node 3 of a layer differs"),
        (lambda graph: _with_another_edge(graph), "wait for others in different ways"),
        (lambda graph: _with_a_node_more(graph), "one layer is 4 nodes and another 5"),
        (lambda graph: _with_a_wrong_address(graph), "node 2 of a layer differs"),
    ],
)
def test_whatever_else_differs_keeps_a_layer_from_being_copied(
    change: Callable[[FakeGraph], list[Block]], reason: str
) -> None:
    found = Template.of(*change(FakeGraph())[1:])
    assert isinstance(found, str) and reason in found


def _reread(graph: FakeGraph, blocks: list[Block], handles: list[int]) -> list[Block]:
    return [*blocks[:2], Block(BlockNodes.read(graph, handles, blocks[1].nodes.handles), blocks[2].memories)]


def _with_a_scalar(graph: FakeGraph) -> list[Block]:
    blocks = blocks_of(graph, 3)
    handles = list(blocks[2].nodes.handles)
    graph.contents[handles[3]] = kernel(6, STATE)
    return _reread(graph, blocks, handles)


def _with_another_edge(graph: FakeGraph) -> list[Block]:
    blocks = blocks_of(graph, 3)
    handles = list(blocks[2].nodes.handles)
    graph.edges[handles[2]] = [(node, PLAIN) for node, _ in graph.edges[handles[2]]]
    return _reread(graph, blocks, handles)


def _with_a_node_more(graph: FakeGraph) -> list[Block]:
    blocks = blocks_of(graph, 3)
    return _reread(graph, blocks, [*blocks[2].nodes.handles, graph.launch(kernel(1))])


def _with_a_wrong_address(graph: FakeGraph) -> list[Block]:
    """Of a cache's, at another place than the other layer's."""
    blocks = blocks_of(graph, 3)
    handles = list(blocks[2].nodes.handles)
    _, keys, values = (memory.begin for memory in blocks[2].memories)
    graph.contents[handles[2]] = kernel(keys + 8, values, SCRATCH, grid=8)
    return _reread(graph, blocks, handles)


def test_a_number_that_looks_like_an_address_stays() -> None:
    """Even where it lies within the tensors of the very layer that is copied."""
    memories = [Memory(0x4_0000_0000, 0x4_0000_1000), *weights_of(2)[1:]]
    graph = FakeGraph()
    blocks = blocks_of(graph, 2)
    handles = launch_layer(graph, memories)
    last = Block(BlockNodes.read(graph, handles, blocks[1].nodes.handles), memories)
    template = template_of(blocks[1], last)
    copy = Copier(template, graph).add(template.moves_to(weights_of(5)), handles)
    assert graph.contents[copy[1]] == kernel(weights_of(5)[0].begin + 0x10, STATE, LOOKS_LIKE_AN_ADDRESS, SCRATCH)


def test_memory_that_two_tensors_share_goes_to_one_place() -> None:
    spans = Spans([Memory(100, 200), Memory(150, 250), Memory(300, 400)])
    moves = spans.moves_to([Memory(1100, 1200), Memory(1150, 1250), Memory(300, 400)])
    assert [moves(address) for address in (99, 100, 199, 249, 250, 300, 399)] == [99, 1100, 1199, 1249, 250, 300, 399]
    with pytest.raises(NotCopied, match="share memory"):
        spans.moves_to([Memory(1100, 1200), Memory(2150, 2250), Memory(300, 400)])


def test_a_tensor_that_two_layers_share_and_another_does_not_keeps_it_from_being_copied() -> None:
    graph = FakeGraph()
    *_, earlier, later = blocks_of(graph, 3)
    shared = Memory(0x5000, 0x6000)
    template = template_of(*(block._replace(memories=[*block.memories, shared]) for block in (earlier, later)))
    assert template.moves_to([*weights_of(4), shared])(0x5008) == 0x5008
    with pytest.raises(NotCopied, match="has one of its own"):
        template.moves_to([*weights_of(4), Memory(0x7000, 0x8000)])


def test_a_driver_that_adds_other_edges_is_told_on() -> None:
    """One did, for edges of several kinds in one call."""
    graph = FakeGraph()
    *_, earlier, later = blocks_of(graph, 3)
    template = template_of(earlier, later)
    graph.lies = True
    moves = template.moves_to(weights_of(3))
    handles = Copier(template, graph).add(moves, later.nodes.handles)
    assert graph.edges[handles[0]][0][1] == EARLY
    with pytest.raises(CopyFailed, match="other nodes than it was asked"):
        template.check_copy(graph, handles, later.nodes.handles, moves)


def test_the_memory_of_a_tensor_reaches_behind_its_last_number() -> None:
    x = torch.zeros(4, 6, dtype=torch.float16)
    assert Memory.of(x) == (x.data_ptr(), x.data_ptr() + 48)
    assert Memory.of(x[1:3, 2:4]) == (x.data_ptr() + 16, x.data_ptr() + 16 + 2 * (6 + 1 + 1))
    nothing = Memory.of(x[:0])
    assert nothing.end == nothing.begin + 1
