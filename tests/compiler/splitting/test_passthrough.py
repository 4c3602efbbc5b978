"""Pieces that run as their graph: which pieces do, what they compute, and how they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import piecegraph as pg
from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler
from piecegraph.compiler.common.fake_values import fresh_fake_mode, propagate_fakes
from piecegraph.compiler.splitting import passthrough as as_it_is
from piecegraph.compiler.splitting.passthrough import NOTE, build_graph_runner, needs_no_codegen
from piecegraph.passes.ops.all_ops import define_all_ops
from piecegraph.tools.cli import main
from tests.compiler.toy import HIDDEN, SPLIT_OPS, VOCABULARY, batch

DIMS = {"input_ids": {0: "num_tokens"}, "logits_indices": {0: "num_logits"}}


@pytest.fixture(autouse=True)
def matmuls_also_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_it_is, "MATMUL_DEVICES", frozenset({"cpu"}))


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    graph_module = fx.symbolic_trace(function)
    mode = fresh_fake_mode()
    examples = [mode.from_tensor(each) for each in inputs]
    for node, example in zip(graph_module.graph.find_nodes(op="placeholder"), examples, strict=True):
        node.meta["example_value"] = example
    propagate_fakes(graph_module, examples, mode)
    return graph_module


define_all_ops()
X, WEIGHT, ROWS = torch.randn(3, 8), torch.randn(8, 8), torch.tensor([2, 0])

AS_THEY_ARE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a matmul and views": (lambda x, w: F.linear(x.unsqueeze(0), w)[..., :4].view(1, 3, 2, 2).squeeze(0), (X, WEIGHT)),
    "an op of ours": (lambda x: torch.ops.piecegraph.act_mul.default(x, "silu"), (X,)),
    "a lookup of rows": (lambda x, rows: x[rows], (X, ROWS)),
    "an embedding": (lambda rows, w: F.embedding(rows, w), (ROWS, WEIGHT)),
    "several views": (lambda x: x.chunk(2, -1)[1], (X,)),
    "room for a result": (lambda x: x.new_empty((3, 2)), (X,)),
    "room of a dtype": (lambda x: (x, torch.empty(x.size(0), dtype=torch.float16, device="cpu")), (X,)),
    "nothing": (lambda x: x, (X,)),
}

COMPILED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "arithmetic": (lambda x, w: F.linear(x, w) * 2, (X, WEIGHT)),
    "a copy": (lambda x: x.T.reshape(-1), (X,)),
    "a cast": (lambda x: x.to(torch.float16), (X,)),
    "a list of numbers": (lambda x, rows: x[rows, [0, 1]], (X, ROWS)),
    "a column of rows": (lambda x, rows: x[rows, 0], (X, ROWS)),
    "room of the process's dtype": (lambda x: (x, torch.empty(x.size(0))), (X,)),
    "room elsewhere": (lambda x, w: torch.empty((3, 8), out=x, dtype=torch.float32, device="cpu"), (X, WEIGHT)),
    "a write": (lambda x, w: F.linear(x, w).add_(x), (X, WEIGHT)),
    "zeros": (lambda x: x.new_zeros(3), (X,)),
    "an embedding that writes": (lambda rows, w: F.embedding(rows, w, max_norm=1.0), (ROWS, WEIGHT)),
    "a sum": (lambda x: x.sum(-1), (X,)),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_a_piece_that_needs_no_codegen(name: str) -> None:
    function, inputs = AS_THEY_ARE[name]
    assert needs_no_codegen(traced(function, *inputs))


@pytest.mark.parametrize("name", COMPILED)
def test_a_piece_that_needs_codegen(name: str) -> None:
    function, inputs = COMPILED[name]
    assert not needs_no_codegen(traced(function, *inputs))


def test_matmuls_of_other_devices_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor packs the weights of a matmul on a CPU."""
    monkeypatch.setattr(as_it_is, "MATMUL_DEVICES", frozenset({"cuda"}))
    found = {name: needs_no_codegen(traced(function, *inputs)) for name, (function, inputs) in AS_THEY_ARE.items()}
    assert found == {name: name != "a matmul and views" for name in AS_THEY_ARE}


def test_a_piece_run_as_its_graph_makes_no_gradients() -> None:
    """Code that Inductor compiles makes none either."""
    weight = WEIGHT.clone().requires_grad_()
    run = build_graph_runner(traced(lambda x, w: (F.linear(x, w),), X, WEIGHT))
    (found,) = run(X, weight)
    assert not found.requires_grad and torch.is_grad_enabled()
    torch.testing.assert_close(found, F.linear(X, WEIGHT), atol=0, rtol=0)


def test_a_piece_run_as_its_graph_ignores_autocast() -> None:
    """Compiled code ignores it too; a piece traced under autocast, whose casts are not nodes, is compiled."""
    graph_module = traced(lambda x, w: (F.linear(x, w),), X, WEIGHT)
    with torch.autocast("cpu", torch.bfloat16):
        assert not needs_no_codegen(graph_module)
        (found,) = build_graph_runner(graph_module)(X, WEIGHT)
        assert torch.is_autocast_enabled("cpu")
    assert found.dtype == torch.float32
    assert needs_no_codegen(graph_module)


class LinearDecoder(nn.Module):
    """Nothing between two calls of attention but matmuls and views; `gain` is a piece of its own."""

    def __init__(self, *, has_gain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.qkv = nn.ModuleList([nn.Linear(HIDDEN, 3 * HIDDEN, bias=False) for _ in range(3)])
        self.project = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3)])
        self.has_gain = has_gain

    def forward(self, input_ids: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for number, (qkv, project) in enumerate(zip(self.qkv, self.project, strict=True)):
            query, key, value = qkv(hidden).chunk(3, dim=-1)
            out = torch.empty_like(query)
            torch.ops.pgtoy.attention.default(query, key, value, out, f"layer.{number}")
            hidden = project(out)
        if self.has_gain:
            hidden = torch.tanh(hidden) * 3
        return F.linear(hidden[logits_indices], self.embed.weight)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "cache"


def compiled(*, has_gain: bool = False) -> pg.CompiledModel:
    passes = (
        "eliminate-noops",
        "merge-projections",
    )  # select-rows-early's matmuls of fewer rows may be summed otherwise
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compile_workers=0, passes=passes)
    return pg.compile(LinearDecoder(has_gain=has_gain).eval(), config, dynamic_dims=DIMS, example_inputs=batch(9, 2))


def same_as_eager(model: pg.CompiledModel) -> None:
    eager = LinearDecoder()
    for rows in (1, 4, 33):
        inputs = batch(rows, 2, seed=rows)
        with torch.no_grad():
            torch.testing.assert_close(model(*inputs), eager(*inputs), atol=0, rtol=0)


def test_a_model_that_needs_no_codegen_is_never_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled neither cold nor from the cache, equals the module bitwise, and its entries can be proved."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is compiled")

    monkeypatch.setattr("piecegraph.compiler.building.inductor_pieces.standalone_compile", forbidden)
    monkeypatch.setattr("piecegraph.compiler.plans.plan_store.import_loader", forbidden)
    for state in ("miss", "hit"):
        model = compiled()
        report = model.report()
        assert (report.cache.state, report.cache.not_stored) == (state, "")
        assert [(row.kernels, row.note) for row in report.unique_pieces] == [(0, NOTE)] * report.num_unique_pieces
        same_as_eager(model)
        model.close()


def test_such_a_model_is_verified_like_others(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled().close()
    capsys.readouterr()
    assert main(["cache", "verify", "--recompile", "--run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["cache", "ls", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert main(["cache", "show", entry["key"][:12], "--code"]) == 0
    assert "def forward(self" in capsys.readouterr().out


def test_other_pieces_of_a_model_are_compiled(cache: Path) -> None:
    model = compiled(has_gain=True)
    notes = [row.note for row in model.report().unique_pieces]
    assert notes.count(NOTE) == len(notes) - 1
    again = compiled(has_gain=True)
    assert again.report().cache.state == "hit"
    inputs = batch(7, 2)
    torch.testing.assert_close(again(*inputs), model(*inputs), atol=0, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), LinearDecoder(has_gain=True)(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"epilogue_fusion": False}])
def test_with_inductor_options_every_piece_is_compiled(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    compile_here = InductorPieceCompiler._compile_here

    def noted(self: Any, *args: Any) -> Any:
        seen.append(args)
        return compile_here(self, *args)

    monkeypatch.setattr(InductorPieceCompiler, "_compile_here", noted)
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compile_workers=0, inductor_options=options, cache=False)
    model = pg.compile(LinearDecoder().eval(), config, dynamic_dims=DIMS, example_inputs=batch(9, 2))
    assert len(seen) == model.report().num_unique_pieces
