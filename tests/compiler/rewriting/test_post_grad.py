"""Passes inside Inductor: run in compile processes or here, counted, keyed, undone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.common.report import PassRow
from piecegraph.errors import ConfigError, PassExpectation, PassFailed
from tests.compiler import toy  # noqa: F401  (its ops)
from tests.compiler.user_passes import ReluToClampInInductor

MATCHES = 3
"""One relu in each of three pieces that share an artifact."""


class Relus(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        triple = torch.ops.pgtoy.triple.default
        made: torch.Tensor = torch.relu(triple(torch.relu(triple(torch.relu(x - 1)) - 1)) - 1)
        return made


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))


class SummedRelus(Relus):
    """Numbers are summed in each piece: else it would be compiled for no size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.cumsum(0)).cumsum(0)


def compiled(
    *passes: ReluToClampInInductor, workers: int = 0, model: type[Relus] = Relus, **options: object
) -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=("pgtoy::triple",), compile_workers=workers, passes=passes, **options)  # type: ignore[arg-type]
    return pg.compile(model(), config, dynamic_dims={"x": 0}, example_inputs=(torch.randn(4, 8),))


def row_of(model: pg.CompiledModel) -> PassRow:
    (row,) = model.report().passes
    return row


def same_as_the_module(model: pg.CompiledModel) -> bool:
    x = torch.linspace(-3, 3, 56).view(7, 8)
    return torch.equal(model(x), Relus()(x))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_inside_inductor_runs_and_is_counted(workers: int, tmp_path: Path) -> None:
    """The pass runs in this process or is made again in others; matches count for the model and each piece."""
    model = compiled(ReluToClampInInductor(), workers=workers, dump_dir=str(tmp_path / "dump"))
    row = row_of(model)
    assert (row.name, row.place, row.matches, row.error, row.note) == (
        "relu-to-clamp-in-inductor",
        "post-grad",
        MATCHES,
        "",
        "",
    )
    pieces = model.report().unique_pieces
    assert sum(piece.passes.get(row.name, 0) * piece.shared_by for piece in pieces) == MATCHES
    assert not any(piece.note for piece in pieces)
    assert same_as_the_module(model)
    diffs = sorted((tmp_path / "dump" / "passes").glob("00-relu-to-clamp-in-inductor.unique-piece-*.diff"))
    assert len(diffs) == sum(row.name in piece.passes for piece in pieces)
    assert "aten::clamp_min" in diffs[0].read_text()


def test_options_are_part_of_the_key_and_loaded_pieces_keep_their_matches() -> None:
    """Relu is clamp at 0; at 100 all is 100, unless the artifact of the other were found. A second start does
    not run the passes, and knows what they did."""
    compiled(ReluToClampInInductor())
    changed = compiled(ReluToClampInInductor(bound=100.0))
    assert row_of(changed).matches == MATCHES
    assert not same_as_the_module(changed)
    again = compiled(ReluToClampInInductor())
    assert again.report().cache.loaded_pieces == 1
    assert (row_of(again).matches, row_of(again).note) == (MATCHES, "")
    assert same_as_the_module(again)
    counted = compiled(ReluToClampInInductor(), expect={"relu-to-clamp-in-inductor": MATCHES})
    assert (row_of(counted).matches, row_of(counted).note) == (MATCHES, "")
    with pytest.raises(PassExpectation, match="expected 5 matches, found 3 and no site that looks like another"):
        compiled(ReluToClampInInductor(), expect={"relu-to-clamp-in-inductor": 5})


def test_a_pass_that_cannot_be_made_elsewhere_runs_here() -> None:
    model = compiled(ReluToClampInInductor(data=object()), workers=2)
    assert row_of(model).matches == MATCHES
    (note,) = {piece.note for piece in model.report().unique_pieces}
    assert note == "compiled in this process: ReluToClampInInductor.data is a object, which is not plain data"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_miscounts_is_undone(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the piece; strict makes it an error."""
    wrong = ReluToClampInInductor(bound=100.0, says=0)
    with caplog.at_level(logging.WARNING, logger="piecegraph"):
        model = compiled(wrong, workers=workers)
    (record,) = caplog.records
    assert "relu-to-clamp-in-inductor" in record.message
    assert row_of(model).error.startswith("unique piece 0: it says that it matched nothing, but it changed the graph")
    assert model.report().cache.not_stored.endswith("a piece was not stored: a pass inside Inductor failed")
    assert same_as_the_module(model)
    with pytest.raises(PassFailed, match=r"failed: unique piece 0: it says .*; passes before it: none\."):
        compiled(replace(wrong, bound=99.0), workers=workers, strict=True)


@pytest.mark.slow
def test_the_pass_runs_on_static_pieces_too() -> None:
    model = compiled(ReluToClampInInductor(bound=100.0), compile_sizes=(3,), model=SummedRelus)
    assert model.report().static_sizes == (3,)
    x = torch.zeros(3, 8)
    assert not torch.equal(model(x), SummedRelus()(x))


def test_without_inductor_the_pass_does_not_run_and_the_report_says_so() -> None:
    model = compiled(ReluToClampInInductor(), compiler="eager")
    assert row_of(model).note == "it did not run: it works inside Inductor, and compiler='eager'"
    with pytest.raises(PassExpectation, match="it did not run"):
        compiled(ReluToClampInInductor(), compiler="eager", expect={"relu-to-clamp-in-inductor": "all"})


def test_the_option_behind_it_cannot_be_given_twice() -> None:
    with pytest.raises(ConfigError, match="inductor_options has 'post_grad_custom_post_pass', which"):
        compiled(ReluToClampInInductor(), inductor_options={"post_grad_custom_post_pass": print})
