"""Passes over the traced graph keep the results, the memory and the module's parameters."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.errors import ConfigError, InputMismatch, PassExpectation, PassFailed
from piecegraph.passes.pipeline import ON_A_GPU
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch
from tests.compiler.user_passes import Breaks, BreaksInPieces, ReluToClamp, ReluToClampInPieces

NUM_LAYERS = 4


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 24, bias=False)
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return out


def compiled(module: nn.Module, compiler: str = "eager", **options: object) -> pg.CompiledModel:
    config = pg.CompileConfig(compiler=compiler, compile_workers=0, **options)  # type: ignore[arg-type]
    return pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(torch.randn(3, 16),))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_merged_projections_give_the_same(compiler: str) -> None:
    module, x = GatedMLP().eval(), torch.randn(5, 16)
    with torch.no_grad():
        expected = module(x)
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = compiled(module, compiler)
    assert {row.name: row.matches for row in model.report().passes}["merge-projections"] == 1
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)  # the module itself works on
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_memory_does_not_grow_and_changes_in_place_are_seen() -> None:
    module = GatedMLP().eval()
    model = compiled(module)
    assert module.gate.weight.untyped_storage().data_ptr() == module.up.weight.untyped_storage().data_ptr()
    x = torch.randn(2, 16)
    before = model(x)
    with torch.no_grad():
        module.up.weight.zero_()
    assert not torch.equal(model(x), before)
    torch.testing.assert_close(model(x), module.down.bias.expand(2, -1))


def test_a_merged_parameter_that_is_replaced_is_noticed() -> None:
    module = GatedMLP().eval()
    model = compiled(module)
    module.up.weight = nn.Parameter(torch.zeros(24, 16))
    with pytest.raises(InputMismatch, match=r"up\.weight was replaced after the model was compiled"):
        model(torch.randn(2, 16))


def test_without_the_pass_nothing_is_touched() -> None:
    module = GatedMLP().eval()
    model = compiled(module, passes=())
    assert model.report().passes == ()
    assert module.gate.weight.untyped_storage().data_ptr() != module.up.weight.untyped_storage().data_ptr()


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"passes has 'merge', which is unknown"):
        pg.CompileConfig(passes=("merge",))
    with pytest.raises(ConfigError, match="passes is .merge-projections.; give a tuple"):
        pg.CompileConfig(passes="merge-projections")  # type: ignore[arg-type]


def decoder(**options: object) -> pg.CompiledModel:
    config = pg.CompileConfig(compiler="eager", split_ops=SPLIT_OPS, **options)  # type: ignore[arg-type]
    return pg.compile(Decoder(NUM_LAYERS), config, dynamic_dims=DIMS, example_inputs=batch(4))


def equals_the_decoder(model: pg.CompiledModel) -> bool:
    with torch.no_grad():
        return torch.equal(model(*batch(7, 2)), Decoder(NUM_LAYERS)(*batch(7, 2)))


@pytest.mark.parametrize("pass_type", [ReluToClamp, ReluToClampInPieces])
def test_matches_are_counted_for_the_model_and_for_each_piece(pass_type: type[ReluToClamp]) -> None:
    """On the traced graph and on pieces; equal pieces stay equal."""
    plain, model = decoder(passes=()), decoder(passes=(pass_type(),))
    (row,) = model.report().passes
    assert (row.matches, row.misses, row.nodes_removed, row.error) == (NUM_LAYERS, (), 0, "")
    pieces = model.report().unique_pieces
    assert len(pieces) == len(plain.report().unique_pieces)
    assert [piece.passes for piece in pieces] == [{}, {row.name: 1}, {row.name: 1}, {}]
    assert sum(piece.passes.get(row.name, 0) * piece.shared_by for piece in pieces) == NUM_LAYERS
    assert f" pass {row.name}: {NUM_LAYERS} matches, " in str(model.report())
    assert equals_the_decoder(model)


def test_a_pass_that_fails_is_named_and_the_model_runs_without_it(caplog: pytest.LogCaptureFixture) -> None:
    """One warning, with the passes before it; those after it run; strict makes it an error."""
    passes = ("merge-projections", ReluToClamp(at_most=1), Breaks(), ReluToClampInPieces())
    with caplog.at_level(logging.WARNING, logger="piecegraph"):
        model = decoder(passes=passes)
    (record,) = caplog.records
    assert record.message.startswith(
        "pass 'breaks' failed: KeyError: 'no such thing'; passes before it: merge-projections, relu-to-clamp. "
    )
    rows = {row.name: row for row in model.report().passes}
    assert rows["breaks"].error == "KeyError: 'no such thing'"
    assert (rows["relu-to-clamp"].matches, rows["relu-to-clamp-in-pieces"].matches) == (1, NUM_LAYERS - 1)
    assert "undone: KeyError: 'no such thing'" in str(model.report())
    assert equals_the_decoder(model)
    with pytest.raises(PassFailed, match=r"'breaks' failed: KeyError.*; passes before it: merge-projections, relu"):
        decoder(passes=passes, strict=True)


def test_a_pass_that_fails_on_pieces_names_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of its unfinished work is left."""
    with caplog.at_level(logging.WARNING, logger="piecegraph"):
        model = decoder(passes=(BreaksInPieces(),))
    assert len(caplog.records) == 1
    (row,) = model.report().passes
    assert row.error == "piece 1: KeyError: 'no such thing' (and on 3 pieces more)"
    assert equals_the_decoder(model)


def test_unmet_expectations_are_errors_that_show_why() -> None:
    """Sites that did not match are listed with the reason and the model's line."""
    some = {"passes": (ReluToClamp(at_most=3),)}
    assert decoder(**some, expect={"relu-to-clamp": 3}).report().passes[0].matches == 3
    assert decoder(passes=(ReluToClamp(),), expect={"relu-to-clamp": "all"}).report().passes[0].matches == NUM_LAYERS
    message = (
        "pass 'relu-to-clamp': expected every site to match, found 3, with 1 sites that did not match:\n"
        r"  relu_3: only 3 may match, at .*toy\.py:\d+ \(result: torch\.Tensor = hidden \+ "
    )
    with pytest.raises(PassExpectation, match=message):
        decoder(**some, expect={"relu-to-clamp": "all"})
    with pytest.raises(PassExpectation, match="expected 4 matches, found 3, with 1 sites"):
        decoder(**some, expect={"relu-to-clamp": 4})
    with pytest.raises(PassExpectation, match="expected every site to match, found 0; it was undone: KeyError"):
        decoder(passes=(Breaks(),), expect={"breaks": "all"})
    with pytest.raises(PassExpectation, match="expected every site to match, found 0 and no site that looks like"):
        decoder(passes=("merge-projections",), expect={"merge-projections": "all"})
    on_a_gpu = min(ON_A_GPU)
    with pytest.raises(PassExpectation, match=f"'{on_a_gpu}' is expected to match .2., but it does not run here"):
        decoder(expect={on_a_gpu: 2})


def test_an_error_comes_before_the_module_is_touched() -> None:
    module = GatedMLP().eval()
    with pytest.raises(PassExpectation, match="expected 7 matches, found 1"):
        compiled(module, expect={"merge-projections": 7})
    assert module.gate.weight.untyped_storage().data_ptr() != module.up.weight.untyped_storage().data_ptr()


def test_graphs_around_a_pass_are_dumped(tmp_path: Path) -> None:
    """Before, after and what changed, for passes that matched."""
    decoder(passes=("merge-projections", ReluToClamp(), ReluToClampInPieces(), Breaks()), dump_dir=str(tmp_path))
    files = sorted(file.name for file in (tmp_path / "passes").iterdir())
    assert files == [f"01-relu-to-clamp.{kind}" for kind in ("after.txt", "before.txt", "diff")]
    diff = (tmp_path / "passes" / files[2]).read_text()
    changed = [line for line in diff.splitlines() if line.startswith(("-relu", "+clamp"))]
    assert len(changed) == 2 * NUM_LAYERS
    assert re.fullmatch(r"-relu = aten::relu\(\w+\) : float32\[\w+, 16\]", changed[0])
    assert re.fullmatch(r"\+clamp_min = aten::clamp_min\(\w+, 0\) : float32\[\w+, 16\]  # relu-to-clamp", changed[1])


@pytest.mark.parametrize("pass_type", [ReluToClamp, ReluToClampInPieces])
def test_passes_run_under_torch_compile_too(pass_type: type[ReluToClamp]) -> None:
    """Through `torch.compile`, where no input is a weight: nothing is merged, and the rest matches."""
    torch._dynamo.reset()
    model = Decoder(NUM_LAYERS).requires_grad_(False)
    options: Any = {"split_ops": SPLIT_OPS, "compiler": "eager", "passes": ("merge-projections", pass_type())}
    by_name = torch.compile(model, backend="piecegraph", fullgraph=True, dynamic=True, options=options)
    assert torch.equal(by_name(*batch(9, 3)), model(*batch(9, 3)))
    (made,) = pg.compiled_models(by_name)
    assert [(row.name, row.matches) for row in made.report().passes] == [
        ("merge-projections", 0),
        (pass_type.name, NUM_LAYERS),
    ]
