"""A library that is absent, broken or too old is not called, and the reason says what to install."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from piecegraph.runner.state_layers.libraries.choice import Library
from piecegraph.runner.state_layers.libraries.installed import installed, load_function


def pretend(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | None) -> None:
    """Let a package `fla` be found; without a function, its import fails."""
    names = ("fla", "fla.ops", "fla.ops.gated_delta_rule")
    for name in names:
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        monkeypatch.setitem(sys.modules, name, module)
    if function is None:
        monkeypatch.setitem(sys.modules, names[-1], None)
    else:
        setattr(sys.modules[names[-1]], "chunk_gated_delta_rule", function)  # noqa: B010


def test_a_package_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.runner.state_layers.libraries.installed.find_spec", lambda name: None)
    missing = installed()[Library.MAMBA_SSM]
    assert missing is not None and missing.startswith("not installed (pip install 'mamba-ssm")


def test_a_function_with_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda q, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: None)
    assert installed()[Library.FLA] == (
        "too old: its chunk_gated_delta_rule takes no chunk_indices (pip install 'flash-linear-attention>=0.6')"
    )
    assert installed(imports=False)[Library.FLA] is None


def test_a_package_that_fails_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    missing = installed()[Library.FLA]
    assert missing is not None and missing.startswith("installed, but cannot be imported (ModuleNotFoundError: ")


def test_the_function_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(
        initial_state: Any, output_final_state: Any, use_qk_l2norm_in_kernel: Any, cu_seqlens: Any, chunk_indices: Any
    ) -> None: ...

    pretend(monkeypatch, function)
    assert installed()[Library.FLA] is None and load_function(Library.FLA) is function
