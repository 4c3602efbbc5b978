from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from piecegraph.compiler.building import inductor_pieces as inductor
from piecegraph.compiler.store.cache_choice import open_store
from piecegraph.runner.startup.compile_ahead import compile_ahead
from piecegraph.tools.cache.entries.eager_pieces import eager_pieces
from piecegraph.tools.cli import main
from piecegraph.tools.command_line.compile_flags import engine_config
from tests.runner.tiny_models import llama_config

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

REASON = "Inductor failed: NotImplementedError: no lowering"


@pytest.mark.slow
def test_explain_tells_which_pieces_run_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known before the model is compiled; afterwards there is what its compile noted."""

    def fail(*args: object) -> None:
        raise NotImplementedError("no lowering")

    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)
    monkeypatch.setattr(inductor, "standalone_compile", fail)
    folder = str(tmp_path / "model")
    AutoModelForCausalLM.from_config(llama_config(num_hidden_layers=1)).save_pretrained(folder)
    options = {"dtype": "float32", "device": "cpu", "compilation_config": {"compile_workers": 0}}
    config = engine_config(folder, options)
    assert eager_pieces(config) == {}
    report = compile_ahead(config, open_store(config.compile)).report
    assert set(report.eager_pieces.values()) == {REASON}
    assert dict(eager_pieces(config)) == {str(index): reason for index, reason in report.eager_pieces.items()}
    capsys.readouterr()
    flags = ["--dtype", "float32", "--device", "cpu", "--quiet"]
    assert main(["explain", folder, *flags]) == 0
    assert f"slower      unique piece 0 runs eagerly: {REASON}" in capsys.readouterr().out
    assert main(["explain", folder, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eager_pieces"]["0"] == REASON
    assert eager_pieces(engine_config(folder, {**options, "compiler": "eager", "compilation_config": None})) == {}
