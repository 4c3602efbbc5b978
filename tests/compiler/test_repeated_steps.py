"""Where the steps of a plan repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from piecegraph.compiler.plan import CallStep, PieceStep, Plan, Slot, Step
from piecegraph.compiler.repeated_steps import BlockInputs, Repeat, find_repeat


def attention(layer: int, **constants: Any) -> CallStep:
    args = (Slot(f"q{layer}"), Slot(f"out{layer}"), constants.get("window", 0), f"layer.{layer}")
    return CallStep(function="attend", op="lib::attend", args=args, kwargs=(), output=None, is_split_op=True)


def layer_piece(layer: int, unique: int = 1, *more: str) -> PieceStep:
    inputs = (f"out{layer}", f"hidden{layer}", "tables", f"weight{layer}", *more)
    outputs = (f"q{layer + 1}", f"out{layer + 1}", f"hidden{layer + 1}")
    return PieceStep(index=layer + 1, unique=unique, inputs=tuple(map(Slot, inputs)), outputs=tuple(map(Slot, outputs)))


def plan(
    layers: int,
    attend: Callable[[int], CallStep] = attention,
    piece: Callable[[int], PieceStep] = layer_piece,
    results: Sequence[str] = ("logits",),
) -> Plan:
    head = PieceStep(
        index=0, unique=0, inputs=(Slot("ids"),), outputs=tuple(map(Slot, ("q0", "out0", "hidden0", "tables")))
    )
    tail = PieceStep(index=99, unique=9, inputs=(Slot(f"hidden{layers}"),), outputs=(Slot("logits"),))
    middle: list[Step] = [step for layer in range(layers) for step in (attend(layer), piece(layer))]
    bound = tuple(Slot(f"weight{layer}") for layer in range(layers))
    return Plan(arguments=(Slot("ids"),), bound=bound, steps=(head, *middle, tail), results=tuple(map(Slot, results)))


def test_layers_that_are_alike() -> None:
    found = find_repeat(plan(6))
    assert found == Repeat(first=1, period=2, count=6)
    assert found.end == 13
    assert [found.block_at(number) for number in (0, 1, 2, 3, 13, 15)] == [None, 0, None, 1, 6, None]


def test_layers_of_two_kinds_repeat_together() -> None:
    assert find_repeat(plan(6, lambda layer: attention(layer, window=64 * (layer % 2)))) == Repeat(1, 4, 3)


@pytest.mark.parametrize("odd", [2, 5])
def test_another_layer_ends_them(odd: int) -> None:
    """What is read of a layer of another kind is what is read of any: only its own steps are none of the blocks'."""
    found = find_repeat(plan(8, piece=lambda layer: layer_piece(layer, 1 + (layer == odd))))
    assert found is not None and found.period == 2
    assert found == (Repeat(7, 2, 5) if odd == 2 else Repeat(1, 2, 5))


def test_what_is_needed_for_longer_ends_them() -> None:
    """By a result, or by a layer further on: copies would write over it."""
    assert find_repeat(plan(8, results=("logits", "hidden3"))) == Repeat(7, 2, 5)
    later = find_repeat(plan(8, piece=lambda layer: layer_piece(layer, 1, *(["q2"] if layer == 6 else ["ids"]))))
    assert later is not None and not later.first <= 3 < later.first + 2 * (later.count - 1)


def test_what_a_layer_keeps_to_itself_and_the_last_one_leaves_behind() -> None:
    """What others make for their own attention alone is gone when they are done: the last is none of them."""
    inner = PieceStep(index=0, unique=5, inputs=(Slot("ids"),), outputs=tuple(map(Slot, ("hidden0", "tables"))))

    def steps(layer: int) -> list[Step]:
        first = PieceStep(
            index=0, unique=1, inputs=(Slot(f"hidden{layer}"),), outputs=(Slot(f"q{layer}"), Slot(f"out{layer}"))
        )
        last = PieceStep(index=0, unique=2, inputs=(Slot(f"out{layer}"),), outputs=(Slot(f"hidden{layer + 1}"),))
        return [first, attention(layer), last]

    middle = [step for layer in range(6) for step in steps(layer)]

    def ending(*names: str) -> Plan:
        tail = PieceStep(index=0, unique=9, inputs=tuple(map(Slot, names)), outputs=(Slot("logits"),))
        return Plan(arguments=(Slot("ids"),), bound=(), steps=(inner, *middle, tail), results=(Slot("logits"),))

    assert find_repeat(ending("hidden6")) == Repeat(1, 3, 6)
    found = find_repeat(ending("hidden6", "q5"))
    assert found is not None and found.period == 3 and found.end <= 18


def test_layers_that_read_two_back_are_not_alike() -> None:
    found = find_repeat(plan(6, piece=lambda layer: layer_piece(layer, 1, f"q{max(layer - 1, 0)}")))
    assert found is None or found.period > 2 or found.count < 3


def test_nothing_repeats() -> None:
    assert find_repeat(plan(4, piece=lambda layer: layer_piece(layer, 1 + layer))) is None
    assert find_repeat(plan(0)) is None


def test_what_blocks_are_given() -> None:
    whole = plan(3)
    found = find_repeat(whole)
    assert found is not None
    inputs = BlockInputs(whole, found)
    assert inputs.all(4) == ("out1", "hidden1", "tables", "weight1")
    assert inputs.given(4) == ("tables", "weight1")
    assert inputs.given(3) == ()
    assert "hidden3" in inputs.made and "hidden0" not in inputs.made
