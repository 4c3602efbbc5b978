from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from piecegraph import __version__
from piecegraph.tools.bench.measure import machine
from piecegraph.tools.cli import main


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "devices", lambda: {"cuda": None, "gpus": None, "cpu": "AVX2, 2 threads"})


def test_env_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The object has every fact by name, among them the cache root and what decided it."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path))
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["piecegraph"] == __version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cache_root"] == str(tmp_path)
    assert facts["cache_root_set_by"] == "PIECEGRAPH_CACHE_DIR"
    assert facts["variables"] == {"PIECEGRAPH_CACHE_DIR": str(tmp_path)}
    assert facts["packages"]["torch"]


def test_env_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"piecegraph:       {__version__}\n" in out
    assert "gpus:             none\n" in out


def test_a_missing_compiler_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert machine.cxx_compiler() is None
