"""What a caller puts around a model becomes part of its first and last graph."""

from __future__ import annotations

import pytest
import torch

from piecegraph.compiler.splitting.plan import CallStep
from piecegraph.compiler.splitting.segments import Lifetimes, Segment, num_graphs, split_into_segments
from piecegraph.errors import UsageError
from tests.compiler.graphs.test_capture import DESCRIPTORS, DEVICES, StaticInputs, compiled_decoder
from tests.compiler.toy import batch


@pytest.mark.parametrize("device", DEVICES)
def test_before_and_after_run_inside_the_graphs(device: str) -> None:
    """A replay prepares, runs and picks: as many graphs as without, and bitwise what calls in turn give."""
    compiled = compiled_decoder(device)
    source = torch.zeros(8, dtype=torch.int64, device=device)

    def before(input_ids: torch.Tensor, rows: torch.Tensor) -> None:
        input_ids.copy_(source[: input_ids.shape[0]] * 2)

    def after(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": logits, "token": logits.argmax(-1)}

    static = StaticInputs(device)
    plain = compiled.capture(DESCRIPTORS, StaticInputs(device), mode="PIECEWISE")
    graphs = compiled.capture(DESCRIPTORS, static, mode="PIECEWISE", before=before, after=after)
    for descriptor in DESCRIPTORS:
        assert graphs.costs(descriptor) == plain.costs(descriptor)
        for seed in range(3):
            source.copy_(batch(8, 2, seed)[0] // 2)
            result = graphs.replay(descriptor)
            ids, rows = static.of[descriptor]
            assert torch.equal(ids, source[: descriptor.num_tokens] * 2)
            expected = compiled(ids, rows)
            assert torch.equal(result["logits"], expected)
            assert torch.equal(result["token"], expected.argmax(-1))


def test_a_step_holds_its_own_under_full() -> None:
    with pytest.raises(UsageError, match="call them in step itself"):
        compiled_decoder().capture(DESCRIPTORS, StaticInputs(), mode="FULL", after=lambda logits: logits)


def test_one_graph_between_two_split_ops() -> None:
    """The pieces on either side of a cut that is no split op share a graph."""
    plan = compiled_decoder().plan
    parts = split_into_segments(plan, has_before=True, has_after=True)
    split_ops = [part for part in parts if not isinstance(part, Segment)]
    segments = [part for part in parts if isinstance(part, Segment)]
    assert [step for _, step in split_ops] == list(plan.split_steps)
    assert len(segments) == len(split_ops) + 1 == num_graphs(plan, has_before=False, has_after=False)
    assert len(plan.piece_steps) > len(segments)
    assert [segment.has_before for segment in segments] == [True, False, False, False]
    assert [segment.has_after for segment in segments] == [False, False, False, True]
    assert segments[-1].name == "pieces 3-4, after"
    steps = sorted(pair for part in parts for pair in (part.steps if isinstance(part, Segment) else (part,)))
    assert steps == list(enumerate(plan.steps))


def test_every_value_a_stretch_reads_was_left_to_it() -> None:
    plan = compiled_decoder().plan
    lifetimes = Lifetimes(plan)
    known = {slot.name for slot in (*plan.arguments, *plan.bound)}
    for part in split_into_segments(plan, has_before=False, has_after=True):
        if isinstance(part, Segment):
            assert lifetimes.inputs(part) <= known
            known |= set(lifetimes.outputs(part))
        else:
            assert isinstance(part[1], CallStep) and part[1].output is None
