from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.piece_compilers.protocol import RunPiece
from piecegraph.compiler.splitting.plan import CallStep, PieceStep
from piecegraph.compiler.verify.walk import walk
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch


@pytest.fixture(scope="module")
def compiled() -> pg.CompiledModel:
    config = pg.CompileConfig(compiler="eager", split_ops=SPLIT_OPS)
    return pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(5, 2))


def test_a_walk_gives_the_result_of_a_call(compiled: pg.CompiledModel) -> None:
    """The results are bitwise equal, and the hooks see every piece and split op in order."""
    pieces: list[int] = []
    ops: list[str] = []

    def on_piece(step: PieceStep, run: RunPiece, inputs: tuple[Any, ...]) -> Sequence[Any]:
        pieces.append(step.index)
        return run(*inputs)

    def on_split_op(
        step: CallStep, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        ops.append(step.op)
        return function(*args, **kwargs)

    args = batch(3)
    assert torch.equal(walk(compiled.parts(args), on_piece, on_split_op), compiled(*args))
    assert pieces == list(range(compiled.report().num_pieces))
    assert ops == [call.op for call in compiled.split_calls]


def test_a_hook_may_replace_outputs(compiled: pg.CompiledModel) -> None:
    """The rest of the model reads what `on_piece` returns."""

    def zeros(step: PieceStep, run: RunPiece, inputs: tuple[Any, ...]) -> Sequence[Any]:
        return [torch.zeros_like(output) for output in run(*inputs)]

    result = walk(compiled.parts(batch(3)), zeros)
    assert not result.any()
