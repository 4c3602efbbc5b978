from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from piecegraph import __version__
from piecegraph.tools.bench.measure import cpu_rates, machine
from piecegraph.tools.cli import main


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "devices", lambda: {"cuda": None, "gpus": None, "cpu": "AVX2, 2 threads"})
    rates = cpu_rates.CpuRates(
        num_threads=2, copy_bytes_per_s=2e10, read_bytes_per_s=1e10, gemm_flops_per_s={"int8": 3e11}
    )
    monkeypatch.setattr(cpu_rates, "measure_cpu_rates", lambda: rates)


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
    assert facts["cpu_rates"]["copy_bytes_per_s"] == 2e10 and facts["cpu_rates"]["gemm_flops_per_s"] == {"int8": 3e11}


def test_env_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"piecegraph:       {__version__}\n" in out
    assert "gpus:             none\n" in out
    assert "cpu rates:        copy 20 GB/s, read 10 GB/s, GEMM of 1024^3 in GFLOP/s: int8 300 (2 threads)\n" in out


def test_without_torch_no_rates_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "devices", lambda: {"torch_problem": "ImportError: no"})
    assert main(["env", "--json"]) == 0
    assert "cpu_rates" not in json.loads(capsys.readouterr().out)


def test_instructions_are_those_that_kernels_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(machine, "cpu_instructions", lambda: frozenset({"fpu", "avx512_bf16", "avx2"}))
    assert machine.devices()["cpu_instructions"] == "avx2, avx512_bf16"


def test_a_missing_compiler_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert machine.cxx_compiler() is None
