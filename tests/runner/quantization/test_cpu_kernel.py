"""Which kernel multiplies by int8 weights on a CPU, and what says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph.compiler.own_kernels.cpp_library import NoLibrary
from piecegraph.config import CompileConfig
from piecegraph.passes.kernels.cpu import int8_rows
from piecegraph.runner.quantization import cpu_kernel
from piecegraph.runner.quantization.cpu_kernel import NEEDED, choose_cpu_kernel
from piecegraph.runner.quantization.methods.all_methods import METHODS

PLAIN: Any = SimpleNamespace()
QUANTISED: Any = SimpleNamespace(quantization_config={})


@pytest.fixture(autouse=True)
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_rows, "_kernel", None)
    monkeypatch.setattr(int8_rows, "_why_not", "it was not loaded")
    monkeypatch.setattr(cpu_kernel, "cpu_instructions", lambda: frozenset(NEEDED))


def no_compiler(*args: object) -> None:
    raise NoLibrary("there is no C++ compiler")


def test_without_the_instructions_it_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "cpu_instructions", lambda: frozenset({"avx512bw", "avx512vl"}))
    monkeypatch.setattr(cpu_kernel, "library_of", lambda *args: pytest.fail("it cannot run"))
    choose_cpu_kernel("int8", PLAIN, "cpu", CompileConfig())
    assert "(not by our C++ kernel: no avx512_vnni)" in METHODS["int8"].kernels["cpu"]


def test_without_a_compiler_torch_multiplies_and_the_note_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "library_of", no_compiler)
    choose_cpu_kernel(None, QUANTISED, "cpu", CompileConfig())
    note = METHODS["int8"].kernels["cpu"]
    assert note.startswith("_weight_int8pack_mm for up to 16 rows (not by our C++ kernel: there is no C++ compiler)")


def test_models_that_cannot_use_it_do_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "library_of", lambda *args: pytest.fail("nothing would use it"))
    choose_cpu_kernel(None, PLAIN, "cpu", CompileConfig())
    choose_cpu_kernel("int8", PLAIN, "cuda", CompileConfig())


def test_it_is_kept_beside_eager_pieces_and_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []
    monkeypatch.setattr(cpu_kernel, "library_of", lambda source, cache: caches.append(cache))
    monkeypatch.setattr(int8_rows, "use", lambda library: monkeypatch.setattr(int8_rows, "_why_not", ""))
    for _ in range(2):
        choose_cpu_kernel("int8", PLAIN, "cpu", CompileConfig(compiler="eager"))
    (cache,) = caches
    assert cache.store is not None
    assert METHODS["int8"].kernels["cpu"] == "our C++ kernel for up to 32 rows, bfloat16 GEMM for more"
