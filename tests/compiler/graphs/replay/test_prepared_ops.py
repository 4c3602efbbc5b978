"""Split ops prepared at capture: launched, not dispatched, with the same bits; metadata read once a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.graphs.replay.prepared_ops import prepared_ops
from piecegraph.errors import GraphNotCaptured, SplitOpNotFound, UsageError
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch

OP = "pgtoy::attention"
DESCRIPTORS = [pg.BatchDescriptor(num_tokens=size) for size in (1, 4)]
NUM_LAYERS = 3


def make_inputs(descriptor: pg.BatchDescriptor) -> Sequence[torch.Tensor]:
    return batch(descriptor.num_tokens, 2)


def compiled_decoder(device: str = "cpu") -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager")
    examples = [tensor.to(device) for tensor in batch(9, 2)]
    return pg.compile(Decoder(NUM_LAYERS).to(device), config, dynamic_dims=DIMS, example_inputs=examples)


@dataclass
class Attention:
    """What a runner has: a prepare, launches that take the step's metadata, and how often each ran."""

    step: int = 0  # the metadata
    prepared: list[str] = field(default_factory=list)
    launched: list[tuple[str, int]] = field(default_factory=list)
    reads: int = 0
    declined: dict[str, str | None] = field(default_factory=dict)  # layer -> reason

    def prepare(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str
    ) -> Callable[[int], None] | str | None:
        self.prepared.append(layer)
        if layer in self.declined:
            return self.declined[layer]

        def launch(step: int) -> None:
            self.launched.append((layer, step))
            out.copy_(torch.softmax(query @ key.T, dim=-1) @ value)

        return launch

    def metadata(self) -> int:
        self.reads += 1
        return self.step


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_prepared_op_costs_a_launch_and_gives_the_same_bits(device: str) -> None:
    compiled = compiled_decoder(device)

    def inputs_on_device(descriptor: pg.BatchDescriptor) -> Sequence[torch.Tensor]:
        return [tensor.to(device) for tensor in make_inputs(descriptor)]

    dispatched = compiled.capture(DESCRIPTORS, inputs_on_device, mode="PIECEWISE")
    attention = Attention()
    with pg.register_prepare(OP, attention.prepare, attention.metadata):
        launched = compiled.capture(DESCRIPTORS, inputs_on_device, mode="PIECEWISE")
    assert dispatched.costs(DESCRIPTORS[1]) == {"graph": 4, "dispatch": 3}
    assert dispatched.notes(DESCRIPTORS[1]) == {f"{OP} has no prepare registered": 3}
    assert launched.costs(DESCRIPTORS[1]) == {"graph": 4, "launch": 3}
    assert launched.notes(DESCRIPTORS[1]) == {}
    for seed in range(3):
        for descriptor in DESCRIPTORS:
            inputs = [tensor.to(device) for tensor in batch(descriptor.num_tokens, 2, seed)]
            expected = compiled(*inputs).clone()
            assert torch.equal(dispatched.replay(descriptor, *inputs), expected)
            assert torch.equal(launched.replay(descriptor, *inputs), expected)


def test_metadata_is_read_once_a_replay_and_handed_to_every_launch() -> None:
    attention = Attention()
    with pg.register_prepare(OP, attention.prepare, attention.metadata):
        graphs = compiled_decoder().capture(DESCRIPTORS, make_inputs, mode="PIECEWISE")
    prepared = list(attention.prepared)
    for attention.step in (7, 8):
        attention.launched.clear()
        attention.reads = 0
        graphs.replay(DESCRIPTORS[0])
        assert attention.reads == 1
        assert attention.launched == [(f"layer.{layer}", attention.step) for layer in range(NUM_LAYERS)]
    assert attention.prepared == prepared  # a replay prepares nothing


def test_warm_up_runs_the_launches_inside_the_context() -> None:
    """A kernel that compiles at its first launch does so before anything is recorded."""
    attention = Attention()
    phases: list[str] = []
    during: list[tuple[str, int]] = []

    @contextmanager
    def context(descriptor: pg.BatchDescriptor, phase: str) -> Iterator[None]:
        phases.append(phase)
        before = len(attention.launched)
        yield
        during.append((phase, len(attention.launched) - before))

    with pg.register_prepare(OP, attention.prepare, attention.metadata):
        compiled_decoder().capture(DESCRIPTORS[:1], make_inputs, mode="PIECEWISE", context=context)
    assert during == [("warmup", 3), ("warmup", 3), ("capture", 3)]
    assert attention.reads == 3
    assert len(attention.prepared) == 9


@pytest.mark.parametrize(
    ("reason", "note"),
    [(None, "its prepare does not take this call"), ("the head is too wide", "the head is too wide")],
)
def test_a_prepare_may_decline_a_call(reason: str | None, note: str) -> None:
    """That call is dispatched, the others are launched, and the reason is kept."""
    compiled = compiled_decoder()
    attention = Attention(declined={"layer.1": reason})
    with pg.register_prepare(OP, attention.prepare, attention.metadata):
        graphs = compiled.capture(DESCRIPTORS, make_inputs, mode="PIECEWISE")
    assert graphs.costs(DESCRIPTORS[0]) == {"graph": 4, "launch": 2, "dispatch": 1}
    assert graphs.notes(DESCRIPTORS[0]) == {f"{OP}: {note}": 1}
    inputs = batch(4, 2, seed=3)
    assert torch.equal(graphs.replay(DESCRIPTORS[1], *inputs), compiled(*inputs))


def test_an_op_that_returns_is_dispatched() -> None:
    class Triples(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.pgtoy.triple.default(x + 1) - 1
            return result

    config = pg.CompileConfig(split_ops=("pgtoy::triple",), compiler="eager")
    compiled = pg.compile(Triples(), config, dynamic_dims={"x": 0}, example_inputs=(torch.ones(3),))
    with pg.register_prepare("pgtoy::triple", lambda x: lambda metadata: None, lambda: None):
        graphs = compiled.capture([DESCRIPTORS[1]], lambda d: [torch.ones(d.num_tokens)], mode="PIECEWISE")
    assert graphs.costs(DESCRIPTORS[1]) == {"graph": 2, "dispatch + copy": 1}
    assert graphs.notes(DESCRIPTORS[1]) == {"pgtoy::triple returns a value, which a prepared launch could not": 1}
    assert graphs.replay(DESCRIPTORS[1], torch.arange(4.0)).tolist() == [2, 5, 8, 11]


def test_a_failing_prepare_fails_its_bucket() -> None:
    """As a failing op does: that bucket runs without graphs."""

    def prepare(query: torch.Tensor, *rest: Any) -> Callable[[Any], None]:
        if query.shape[0] == 4:
            raise RuntimeError("no kernel for 4")
        return lambda metadata: None

    with pg.register_prepare(OP, prepare, lambda: None):
        graphs = compiled_decoder().capture(DESCRIPTORS, make_inputs, mode="PIECEWISE")
    assert [failed.reason for failed in graphs.failed] == ["RuntimeError: no kernel for 4"]
    assert graphs.descriptors == (DESCRIPTORS[0],)
    with pytest.raises(GraphNotCaptured):
        graphs.costs(DESCRIPTORS[1])


def test_a_full_graph_is_one_launch() -> None:
    graphs = compiled_decoder().capture(DESCRIPTORS, make_inputs, mode="FULL")
    assert graphs.costs(DESCRIPTORS[0]) == {"graph": 1}


def test_an_op_has_at_most_one_prepare() -> None:
    """One prepare an op; names are checked; removing twice is harmless and removes nobody else's."""
    first = pg.register_prepare(OP, lambda *args: None, lambda: None)
    with pytest.raises(UsageError, match=r"pgtoy::attention has a prepare already; call remove\(\)"):
        pg.register_prepare(OP, lambda *args: None, lambda: None)
    first.remove()
    with pg.register_prepare(OP, lambda *args: None, lambda: None):
        first.remove()
        assert OP in prepared_ops()
    assert OP not in prepared_ops()
    for name in ("pgtoy::atention", "attention", ""):
        with pytest.raises(SplitOpNotFound, match="is not registered.*Define the op before"):
            pg.register_prepare(name, lambda *args: None, lambda: None)
