"""Which of our C++ kernels run on a CPU, and what says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph import environment
from piecegraph.compiler.own_kernels.cpp_library import NoLibrary
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError
from piecegraph.passes.kernels.common.cpp_kernel import NOT_LOADED, CppKernel
from piecegraph.passes.kernels.cpu import int8_rows
from piecegraph.runner.models import cpu_kernels
from piecegraph.runner.models.cpu_kernels import (
    OF_EVERY_MODEL,
    OF_INT8,
    choose_cpu_kernels,
    cpu_kernels_notes,
    keep_cpu_kernels,
)
from piecegraph.runner.quantization.methods.all_methods import METHODS

KERNELS = (*OF_INT8, *OF_EVERY_MODEL)
PLAIN: Any = SimpleNamespace()
QUANTISED: Any = SimpleNamespace(quantization_config={})


@pytest.fixture(autouse=True)
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "call", None)
        monkeypatch.setattr(kernel, "why_not", NOT_LOADED)
    monkeypatch.setattr(cpu_kernels, "cpu_instructions", lambda: frozenset(int8_rows.KERNEL.instructions))


def of_every_model(source: Path, cache: object) -> None:
    assert source != int8_rows.KERNEL.source, "nothing would use it"


def loaded(monkeypatch: pytest.MonkeyPatch, kernel: CppKernel) -> None:
    monkeypatch.setattr(kernel, "call", lambda *args: 0)
    monkeypatch.setattr(kernel, "why_not", "")


def no_compiler(*args: object) -> None:
    raise NoLibrary("there is no C++ compiler")


def test_without_the_instructions_it_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "cpu_instructions", lambda: frozenset({"avx512bw", "avx512vl"}))
    monkeypatch.setattr(cpu_kernels, "library_of", of_every_model)
    for kernel in OF_EVERY_MODEL:
        monkeypatch.setattr(kernel, "use", lambda library: None)
    choose_cpu_kernels("int8", PLAIN, "cpu", CompileConfig())
    assert "(not by our C++ kernel: no avx512_vnni)" in METHODS["int8"].kernels["cpu"]


def test_without_a_compiler_torch_computes_and_the_notes_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "library_of", no_compiler)
    choose_cpu_kernels(None, QUANTISED, "cpu", CompileConfig())
    note = METHODS["int8"].kernels["cpu"]
    assert note.startswith("_weight_int8pack_mm for up to 16 rows (not by our C++ kernel: there is no C++ compiler)")
    (note,) = cpu_kernels_notes("cpu")
    what = "attention of single tokens; rotary embedding; drawing tokens; min_p, top_k and top_p; a step's inputs"
    assert note == f"{what}: by torch, not by our C++ kernels: there is no C++ compiler"
    assert not cpu_kernels_notes("cuda")


def test_filling_a_cache_leaves_kernels_in_use_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they cannot be built again: a running model goes on computing by them."""
    for kernel in KERNELS:
        loaded(monkeypatch, kernel)
    calls = [kernel.call for kernel in KERNELS]
    cache = CompileCache(None, False)
    monkeypatch.setattr(cpu_kernels, "library_of", no_compiler)
    keep_cpu_kernels("int8", PLAIN, "cpu", cache)
    monkeypatch.setenv(environment.CPU_KERNELS, "0")
    keep_cpu_kernels("int8", PLAIN, "cpu", cache)
    assert [kernel.call for kernel in KERNELS] == calls
    (note,) = cpu_kernels_notes("cpu")
    assert note.startswith("PIECEGRAPH_CPU_KERNELS=0 has no effect on kernels that this process has loaded")


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "library_of", lambda *args: pytest.fail("they are turned off"))
    monkeypatch.setenv(environment.CPU_KERNELS, "0")
    choose_cpu_kernels("int8", PLAIN, "cpu", CompileConfig())
    assert {kernel.why_not for kernel in KERNELS} == {"PIECEGRAPH_CPU_KERNELS=0"}


def test_an_unknown_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CPU_KERNELS, "no")
    with pytest.raises(ConfigError, match="PIECEGRAPH_CPU_KERNELS='no' is not known: 0 has torch compute"):
        choose_cpu_kernels(None, PLAIN, "cpu", CompileConfig())


def test_models_that_cannot_use_it_do_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "library_of", of_every_model)
    for kernel in OF_EVERY_MODEL:
        monkeypatch.setattr(kernel, "use", lambda library: None)
    choose_cpu_kernels(None, PLAIN, "cpu", CompileConfig())
    monkeypatch.setattr(cpu_kernels, "library_of", lambda *args: pytest.fail("nothing would use it"))
    choose_cpu_kernels("int8", PLAIN, "cuda", CompileConfig())


def test_they_are_kept_beside_eager_pieces_and_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []
    monkeypatch.setattr(cpu_kernels, "library_of", lambda source, cache: caches.append(cache))
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "use", lambda library, kernel=kernel: loaded(monkeypatch, kernel))
    for _ in range(2):
        choose_cpu_kernels("int8", PLAIN, "cpu", CompileConfig(compiler="eager"))
    assert len(caches) == len({kernel.source for kernel in KERNELS}) and caches.count(caches[0]) == len(caches)
    assert caches[0].store is not None
    assert METHODS["int8"].kernels["cpu"] == (
        "our C++ kernel for float32, and for up to 64 rows of bfloat16, bfloat16 GEMM for more"
    )
