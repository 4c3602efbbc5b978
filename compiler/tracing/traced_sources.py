"""Digests of the source files that a trace went through: a plan is valid while they are unchanged."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path

from piecegraph.compiler.common.call_targets import NotStorable


def digests_of_files(files: Iterable[str]) -> dict[str, str | None]:
    """Return the sha256 (hex) of each file; None for a file that cannot be read."""
    return {file: _digest(file) for file in sorted(set(files))}


def files_of_code(codes: Iterable[types.CodeType]) -> set[str]:
    """Return the files in which functions are written.

    Modules that are part of the interpreter are left out, and so are methods that `dataclasses` generated: the file
    of the class counts.
    """
    return {
        code.co_filename
        for code in codes
        if not code.co_filename.startswith("<frozen ")
        and not (code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__."))
    }


def digests_by_module(digests: Mapping[str, str | None]) -> dict[str, str]:
    """Return the digests that `digests_of_files` found by module name, so that no path is among them.

    Raises `NotStorable` for a file that belongs to no imported module, and for a file that has changed since.
    """
    module_of = {
        file: name
        for name, module in sorted(sys.modules.items(), reverse=True)  # of two names for a file, the first in order
        if (file := getattr(module, "__file__", None)) is not None
    }
    found = {}
    for file, digest in digests.items():
        name = module_of.get(file)
        if name is None or digest is None:
            raise NotStorable(f"it was traced through {file}, which is not a source file of an imported module")
        if _digest(file) != digest:
            raise NotStorable(f"{file} changed while it was compiled")
        found[name] = digest
    return found


def find_changed_module(digests: Mapping[str, str]) -> str | None:
    """Return the first module whose source differs from its digest; None where all agree."""
    for name, digest in digests.items():
        file = _file_of(name)
        if file is None or _digest(file) != digest:
            return name
    return None


def _file_of(name: str) -> str | None:
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec is not None else None


def _digest(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
