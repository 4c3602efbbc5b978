from __future__ import annotations

import json
from typing import Any

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.tools.cache.entries.contents import load
from piecegraph.tools.cache.entries.plan_pieces import PlanPiece, plan_pieces
from tests.tools.cache.models import save, save_model, save_piece


def test_the_pieces_of_a_plan_and_how_often_they_run(store: Store) -> None:
    model = save_model(store, layers=7)
    dynamic, static = (piece.key for piece in model.pieces)
    pieces = plan_pieces(load(store, model.plan.key))
    assert pieces == (PlanPiece(dynamic, 0, None, 7, ("num_tokens",)), PlanPiece(static, 0, 8, 7, ("num_tokens",)))
    assert [piece.name for piece in pieces] == ["piece_0", "piece_0_size_8"]


def test_a_piece_has_none(store: Store) -> None:
    assert plan_pieces(load(store, save_piece(store, "one").key)) == ()


@pytest.mark.parametrize(
    "plan",
    [b"\xff", b"[]", b"null", b'{"plan": {"steps": 3}}', {"plan": {"steps": []}, "pieces": ["../x"], "static": []}],
)
def test_a_plan_in_another_form_falls_back_on_the_notes(store: Store, plan: Any) -> None:
    data = plan if isinstance(plan, bytes) else json.dumps(plan).encode()
    piece = save_piece(store, "one").key
    key = save(store, {"kind": "plan"}, {"plan": data}, {}, {"pieces": [piece, "no key"]}).key
    (found,) = plan_pieces(load(store, key))
    assert found == PlanPiece(piece, None, None, 0, ())
    assert found.name == f"piece_{piece[:12]}"
