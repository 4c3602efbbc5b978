"""Kernels from Python are told by the module that registered them."""

from __future__ import annotations

import pytest
import torch

from piecegraph.compiler.tracing.python_kernels import has_python_kernels, python_kernels_fact

SCALE = 2.0
LIBRARY = torch.library.Library("pgkernels", "DEF")
LIBRARY.define("scaled(Tensor x) -> Tensor")
LIBRARY.impl("scaled", lambda x: x * SCALE, "CompositeImplicitAutograd")


def test_a_global_that_a_kernel_names_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = python_kernels_fact("pgkernels::scaled")
    assert python_kernels_fact("pgkernels::scaled") == before
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert python_kernels_fact("pgkernels::scaled") != before


def test_ops_of_torch_have_no_kernels_of_users() -> None:
    assert has_python_kernels("pgkernels::scaled")
    assert not has_python_kernels("aten::relu")
