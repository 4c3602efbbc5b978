"""Our C++ kernels in tests: built as a start builds them, and taken back after the test."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from piecegraph.compiler.own_kernels.cpp_library import FLAGS, library_of
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.config import CompileConfig
from piecegraph.passes.kernels.common.cpp_kernel import CppKernel

needs_cpp_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


def library(kernel: CppKernel, *flags: str) -> ctypes.CDLL:
    """Return the library of `kernel`; `flags` are more options of the compiler."""
    return library_of(kernel.source, CompileCache.open(CompileConfig()), (*FLAGS, *flags))


def use_kernel(kernel: CppKernel, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Compute by `kernel` until the end of the test."""
    monkeypatch.setattr(kernel, "call", kernel.function_of(library(kernel, *flags)))
