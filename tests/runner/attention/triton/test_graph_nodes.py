"""Nodes of a layer's kernels are enabled and disabled as each batch needs them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.triton import graph_nodes
from piecegraph.runner.attention.triton.graph_nodes import AttentionNodes, Launch, Launches, Node
from piecegraph.runner.attention.triton.kernels.launch import PreparedKernel
from piecegraph.runner.attention.triton.metadata import TritonMetadata, TritonMetadataBuilder

EXEC = 7
KV_WRITE, PREFILL, DECODE, ALL_DECODE = 1, 2, 3, 4
"""Handles of nodes."""


class Kernel:
    def __init__(self, name: str, graph: Graph) -> None:
        self.name, self.graph = name, graph

    def patch(self, graph_exec: int, node: int, grid: tuple[int, int, int], *changed: int) -> None:
        assert graph_exec == EXEC
        self.graph.calls += 1
        self.graph.kernels[node] = (self.name, *changed)


class Graph:
    """What its nodes have become; each runs at first, as in a graph that was just captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: dict[int, tuple[object, ...]] = {}
        self.enabled = dict.fromkeys((KV_WRITE, PREFILL, DECODE, ALL_DECODE), True)
        self.calls = 0

        def set_enabled(graph_exec: int, node: int, is_enabled: bool) -> None:
            assert graph_exec == EXEC and self.enabled[node] != is_enabled, "a call for nothing"
            self.calls += 1
            self.enabled[node] = is_enabled

        monkeypatch.setattr(graph_nodes, "set_enabled", set_enabled)

    def launches(self, metadata: TritonMetadata) -> Launches:
        def launch(name: str, *changed: int) -> Launch:
            return Launch(cast(PreparedKernel, Kernel(name, self)), (1, 1, 1), changed)

        others = metadata.num_reqs - metadata.num_decode_reqs
        return (
            launch("kv_write", others) if others else None,
            launch("prefill", others) if others else None,
            launch("decode", metadata.num_decode_reqs) if metadata.num_decode_reqs else None,
        )

    def runs(self) -> dict[int, tuple[object, ...]]:
        return {node: self.kernels[node] for node, is_enabled in self.enabled.items() if is_enabled}


def batch(num_reqs: int, num_decode_reqs: int) -> TritonMetadata:
    numbers = torch.zeros(8, 1, dtype=torch.int32)
    return TritonMetadataBuilder(16, 8, None, None).build(
        AttentionMetadata(
            num_reqs=num_reqs,
            num_tokens=8,
            max_query_len=4,
            num_decode_reqs=num_decode_reqs,
            query_start_loc=numbers[:, 0],
            seq_lens=numbers[:, 0],
            block_table=numbers,
            slot_mapping=numbers[:, 0],
            host=None,
        )
    )


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    return Graph(monkeypatch)


def test_a_batch_that_is_all_decode_has_its_own_node(graph: Graph) -> None:
    nodes = AttentionNodes(graph.launches, [Node(KV_WRITE), Node(PREFILL), Node(DECODE)], Node(ALL_DECODE))
    steps: list[tuple[tuple[int, int], dict[int, Any]]] = [
        ((4, 4), {ALL_DECODE: ("decode", 4)}),
        ((5, 3), {KV_WRITE: ("kv_write", 2), PREFILL: ("prefill", 2), DECODE: ("decode", 3)}),
        ((2, 0), {KV_WRITE: ("kv_write", 2), PREFILL: ("prefill", 2)}),
        ((0, 0), {}),
        ((6, 6), {ALL_DECODE: ("decode", 6)}),
    ]
    for counts, expected in steps:
        nodes(EXEC, batch(*counts))
        assert graph.runs() == expected


def test_without_a_node_of_its_own_decode_follows_the_others(graph: Graph) -> None:
    graph.enabled[ALL_DECODE] = False
    nodes = AttentionNodes(graph.launches, [Node(KV_WRITE), Node(PREFILL), Node(DECODE)], None)
    for counts, expected in (
        ((4, 4), {DECODE: ("decode", 4)}),
        ((5, 3), {KV_WRITE: ("kv_write", 2), PREFILL: ("prefill", 2), DECODE: ("decode", 3)}),
    ):
        nodes(EXEC, batch(*counts))
        assert graph.runs() == expected


def test_a_batch_like_the_one_before_costs_no_call(graph: Graph) -> None:
    nodes = AttentionNodes(graph.launches, [Node(KV_WRITE), Node(PREFILL), Node(DECODE)], Node(ALL_DECODE))
    metadata = batch(4, 4)
    nodes(EXEC, metadata)
    calls = graph.calls
    nodes(EXEC, metadata)
    assert graph.calls == calls


def test_nodes_are_patched_again_after_a_failure(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the same batch: half of the nodes may be as they were."""
    nodes = AttentionNodes(graph.launches, [Node(KV_WRITE), Node(PREFILL), Node(DECODE)], Node(ALL_DECODE))
    metadata, works = batch(5, 3), getattr(graph_nodes, "set_enabled")  # noqa: B009

    def fails(*args: object) -> None:
        raise RuntimeError("the driver")

    monkeypatch.setattr(graph_nodes, "set_enabled", fails)
    with pytest.raises(RuntimeError, match="the driver"):
        nodes(EXEC, metadata)
    monkeypatch.setattr(graph_nodes, "set_enabled", works)
    nodes(EXEC, metadata)
    assert graph.runs() == {KV_WRITE: ("kv_write", 2), PREFILL: ("prefill", 2), DECODE: ("decode", 3)}
