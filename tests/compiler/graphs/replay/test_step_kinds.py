"""Steps are of one kind if they use the same kernels; a step of unknown kind equals no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from piecegraph.compiler.graphs.replay.step_kinds import step_kind, value_kind
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Slot


def piece(unique: int, *inputs: str) -> PieceStep:
    return PieceStep(index=0, unique=unique, inputs=tuple(map(Slot, inputs)), outputs=())


def test_everything_but_the_contents_of_a_tensor_counts() -> None:
    plain = torch.zeros(4, 6)
    assert value_kind(plain) == value_kind(torch.ones(4, 6)) == value_kind(torch.nn.Parameter(torch.ones(4, 6)))
    others = [plain.half(), plain[:2], plain.T.contiguous().T, plain.to("meta"), torch.zeros(25)[1:].view(4, 6)]
    assert len({value_kind(value) for value in (plain, *others)}) == 1 + len(others)


def test_an_address_counts_up_to_16_bytes() -> None:
    """Weights that lie one after the other in a file are of one kind."""
    memory = torch.zeros(64)
    assert memory.data_ptr() % 64 == 0
    assert value_kind(memory[4:8]) == value_kind(memory[16:20]) != value_kind(memory[2:6])


def test_numbers_count_with_their_type() -> None:
    assert value_kind((1, "a", None)) == value_kind((1, "a", None))
    assert len({value_kind(value) for value in (1, 1.0, True, None, (1,), (1, 1))}) == 6


def test_a_tensor_without_plain_memory_equals_no_other() -> None:
    for value in (torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])):
        assert value_kind(value) != value_kind(value)


def test_the_kind_of_a_piece_is_its_unique_piece_and_inputs() -> None:
    values = {"a": torch.zeros(4), "b": torch.ones(4), "wide": torch.zeros(8), "n": 4, "m": 5}
    kinds: Mapping[str, Any] = {}
    assert step_kind(piece(1, "a", "n"), values, kinds) == step_kind(piece(1, "b", "n"), values, kinds)
    different = [piece(1, "a", "n"), piece(2, "a", "n"), piece(1, "wide", "n"), piece(1, "a", "m")]
    assert len({step_kind(step, values, kinds) for step in different}) == 4


def call(*args: Any, is_split_op: bool = True, **kwargs: Any) -> CallStep:
    return CallStep(
        function="f", op="my::op", args=args, kwargs=tuple(kwargs.items()), output=None, is_split_op=is_split_op
    )


def test_the_kind_of_a_split_op_is_that_of_its_registration() -> None:
    """The function receives the op's arguments; without a function the kind is unknown."""
    windows = {"layer.0": 8, "layer.1": 0, "layer.2": 8}
    kinds = {"my::op": lambda x, *, layer: (x, windows[layer])}
    values = {"x": torch.zeros(4), "y": torch.ones(4)}
    first, second, third = (call(Slot(name), layer=f"layer.{i}") for i, name in enumerate("xyy"))
    assert step_kind(first, values, kinds) == step_kind(third, values, kinds) != step_kind(second, values, kinds)
    assert step_kind(first, values, {}) is None
    assert step_kind(call(3, is_split_op=False), values, kinds) is None
