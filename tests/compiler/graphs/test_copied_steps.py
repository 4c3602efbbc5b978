"""Of layers that are alike a few run while a graph is captured; what the graph then holds is what running all gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.graphs import capture as capture_module
from piecegraph.compiler.graphs import copied_steps, replay_plan
from piecegraph.compiler.graphs.bound_plan import Bound, Values, arguments_of
from piecegraph.compiler.graphs.copied_steps import Copies, run_steps
from piecegraph.compiler.graphs.graph_editor import CopyFailed
from piecegraph.compiler.graphs.known_blocks import Copied, KnownBlocks, known_blocks
from piecegraph.compiler.graphs.prepared_ops import Patch
from piecegraph.compiler.plan import CallStep, Step, step_inputs
from piecegraph.errors import CaptureError
from tests.compiler.graphs.fake_graph import FakeGraph, kernel
from tests.compiler.graphs.test_capture import DESCRIPTORS, StaticInputs
from tests.compiler.graphs.test_prepared_ops import OP
from tests.compiler.graphs.test_warm_up import compiled_decoder
from tests.compiler.toy import batch

NUM_LAYERS = 9


@dataclass
class CachePatch:
    """Of one layer: its node, and where its cache is."""

    node: int
    cache: int

    def __call__(self, graph_exec: int, metadata: Any) -> None: ...

    def moved(self, nodes: Mapping[int, int], move: Callable[[int], int]) -> Patch:
        return CachePatch(nodes[self.node], move(self.cache))


class Recording:
    """The steps of a toy decoder, each of which launches one kernel over its weights, or its layer's cache."""

    def __init__(self, compiled: pg.CompiledModel, caches: Mapping[str, torch.Tensor] | None = None) -> None:
        self.graph = FakeGraph()
        self.caches = caches or {f"layer.{layer}": torch.zeros(64) for layer in range(NUM_LAYERS)}
        self.bound = Bound.of(compiled.parts(batch(5, 2)), prepared_ops={})
        self.ran: list[int] = []
        self.is_movable = True
        self.kinds = {OP: self.kind}

    def kind(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str) -> Any:
        return query, key, value, out, self.caches[layer]

    def run_step(self, number: int, step: Step, values: Values) -> Patch | None:
        self.ran.append(number)
        if isinstance(step, CallStep) and step.is_split_op:
            args, kwargs = arguments_of(step, values)
            cache = self.caches[args[-1]].data_ptr()
            node = self.graph.launch(kernel(cache, 3))
            self.bound.call(step, args, kwargs, values)
            return CachePatch(node, cache) if self.is_movable else lambda graph_exec, metadata: None
        bound = {slot.name for slot in self.bound.plan.bound}
        weights = [values[slot.name].data_ptr() for slot in step_inputs(step) if slot.name in bound]
        self.bound.run(number, step, values)
        self.graph.launch(kernel(*weights, function=len(weights)))
        return None

    def record(self, known: KnownBlocks | None) -> tuple[list[Patch], Any]:
        """`None`: every step runs."""
        steps = tuple(enumerate(self.bound.plan.steps))
        values = self.bound.start()
        with torch.no_grad():
            if known is None:
                patches = run_steps(self.bound, steps, values, self.run_step, None)
            else:
                with known.used():
                    assert self.bound.repeat is not None
                    copies = Copies(self.bound, self.bound.repeat, self.graph, self.kinds)
                    patches = run_steps(self.bound, steps, values, self.run_step, copies)
        return patches, self.bound.finish(values)


@pytest.fixture(autouse=True)
def memory_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one layer's attention reads is where another's does, as in a pool of a GPU's memory."""
    places: dict[tuple[object, ...], torch.Tensor] = {}

    def alias(x: torch.Tensor) -> torch.Tensor:
        return places.setdefault((x.shape, x.stride(), x.storage_offset()), torch.empty_strided(x.shape, x.stride()))

    monkeypatch.setattr(copied_steps, "_alias", alias)


@pytest.fixture(scope="module")
def compiled() -> pg.CompiledModel:
    return compiled_decoder(NUM_LAYERS)


def test_the_graph_is_what_running_every_layer_gives(compiled: pg.CompiledModel) -> None:
    caches = {f"layer.{layer}": torch.zeros(64) for layer in range(NUM_LAYERS)}
    whole, copied, known = Recording(compiled, caches), Recording(compiled, caches), KnownBlocks()
    patches, logits = whole.record(None)
    found, result = copied.record(known)
    assert copied.graph.whole() == whole.graph.whole()
    assert found == patches and len(found) == NUM_LAYERS
    assert result.shape == logits.shape
    repeat = copied.bound.repeat
    assert repeat is not None and repeat.count == NUM_LAYERS - 1
    assert known.told == [Copied(repeat.count - 3, repeat.count, None)]
    assert len(whole.ran) - len(copied.ran) == repeat.period * (repeat.count - 3)


def test_a_recording_after_it_knows_the_blocks(compiled: pg.CompiledModel) -> None:
    """Of weights nothing is looked at again."""
    known = KnownBlocks()
    first, second = Recording(compiled), Recording(compiled)
    first.record(known)
    assert known.are_alike
    second.record(known)
    assert second.ran == first.ran and known.told[0].num_blocks > 0


def test_what_is_known_is_of_one_model(compiled: pg.CompiledModel) -> None:
    """A step may hold two."""
    known, other = KnownBlocks(), compiled_decoder(NUM_LAYERS)
    first, second = Recording(compiled), Recording(other)
    whole = Recording(other, second.caches)
    first.record(known)
    assert known.knows_alike(first.bound.plan) and not known.knows_alike(second.bound.plan)
    second.record(known)
    whole.record(None)
    assert known.knows_alike(second.bound.plan) and not known.knows_alike(first.bound.plan)
    assert second.graph.whole() == whole.graph.whole()


def test_what_blocks_made_has_to_lie_where_it_lay(compiled: pg.CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where kernels are given it as far away as it is: the next layer would read it where the last one had it."""
    monkeypatch.setattr(copied_steps, "_alias", torch.clone)
    recording, known = Recording(compiled), KnownBlocks()
    recording.record(known)
    assert known.told == [Copied(0, NUM_LAYERS - 1, "what one layer made for the next is not where another's is")]


@pytest.mark.parametrize("what", ["no kind", "not movable", "unreadable", "an odd cache"])
def test_where_a_layer_cannot_be_copied_all_run(compiled: pg.CompiledModel, what: str) -> None:
    recording, known = Recording(compiled), KnownBlocks()
    reasons = {
        "no kind": "registered without a kind",
        "not movable": "cannot be changed in a copy",
        "unreadable": "neither a kernel nor a memset",
        "an odd cache": "differ in how they lie in memory",
    }
    if what == "no kind":
        recording.kinds = {}
    elif what == "not movable":
        recording.is_movable = False
    elif what == "unreadable":
        recording.graph.other = set(range(1000, 1100))
    else:
        recording.caches = {**recording.caches, "layer.6": torch.zeros(65)}
    _, result = recording.record(known)
    assert torch.equal(result, compiled(*batch(5, 2)))
    assert known.told == [Copied(0, NUM_LAYERS - 1, known.told[0].reason)]
    assert reasons[what] in str(known.told[0].reason)
    assert recording.ran == list(range(len(recording.bound.plan.steps)))


def test_in_turns_every_other_layer_may_be_alike(compiled: pg.CompiledModel) -> None:
    """As where memory is handed out in turns."""
    caches = {f"layer.{layer}": torch.zeros(64) for layer in range(NUM_LAYERS)}
    graphs = []
    for known in (None, KnownBlocks()):
        recording = Recording(compiled, caches)
        run_step = recording.run_step

        def run_in_turns(
            number: int, step: Step, values: Values, recording: Recording = recording, run_step: Any = run_step
        ) -> Patch | None:
            recording.graph.launch(kernel(0xA000 + number // 2 % 2 * 0x1000))
            return run_step(number, step, values)

        recording.run_step = run_in_turns  # type: ignore[method-assign]
        recording.record(known)
        graphs.append(recording.graph.whole())
        if known is not None:
            assert known.told == [Copied(2, NUM_LAYERS - 1, None)]  # five ran, two were copied, one was left
    assert graphs[0] == graphs[1]


def test_copies_that_fail_are_made_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The bucket they failed in, and all after it."""
    compiled = compiled_decoder(3)
    tried: list[int] = []
    original = replay_plan.record_plan

    def record_plan(bound: Bound, recorder: Any, title: str, patched: Any = ()) -> Any:
        tried.append(int(known_blocks().may_copy))
        if known_blocks().may_copy and len(tried) == 2:
            raise CopyFailed("the driver made other nodes")
        return original(bound, recorder, title, patched)

    monkeypatch.setattr(capture_module, "record_plan", record_plan)
    graphs = compiled.capture(DESCRIPTORS, StaticInputs(), mode="PIECEWISE")
    assert set(graphs.descriptors) == set(DESCRIPTORS)
    assert tried == [1, 1, 0, *[0] * (len(DESCRIPTORS) - 2)]
    assert "the driver made other nodes" in caplog.text


def test_a_driver_that_does_not_tell_is_no_failure(compiled: pg.CompiledModel) -> None:
    recording, known = Recording(compiled), KnownBlocks()

    def read(node: int) -> Any:
        raise CaptureError("cuFuncGetParamInfo of the CUDA driver failed with error 801.")

    recording.graph.read = read  # type: ignore[method-assign]
    recording.record(known)
    assert "error 801" in str(known.told[0].reason)
    assert recording.ran == list(range(len(recording.bound.plan.steps)))


def test_after_the_first_copy_nothing_is_run_instead(compiled: pg.CompiledModel) -> None:
    recording = Recording(compiled)
    recording.graph.room = 3
    with pytest.raises(CopyFailed, match="error 2"):
        recording.record(KnownBlocks())
