"""Digests of the source files that a trace went through: a plan is of use while they are as they were."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path

from piecegraph.compiler.call_targets import NotStorable


def digests_of_files(files: Iterable[str]) -> dict[str, str | None]:
    """sha256 of each file, hex; None for one that cannot be read."""
    return {file: _digest(file) for file in sorted(set(files))}


def files_of_code(codes: Iterable[types.CodeType]) -> set[str]:
    """Where each function is written. Modules that are part of the interpreter are left out, and so are methods that
    `dataclasses` wrote: the file of the class counts."""
    return {
        code.co_filename
        for code in codes
        if not code.co_filename.startswith("<frozen ")
        and not (code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__."))
    }


def by_module(digests: Mapping[str, str | None]) -> dict[str, str]:
    """What `digests_of_files` found, by the module a file is the source of: no path is in it.

    Raises `NotStorable` for a file that is no module's, and for one that has changed since.
    """
    module_of = {
        file: name
        for name, module in sorted(sys.modules.items(), reverse=True)  # of two names of a file, the first in order
        if (file := getattr(module, "__file__", None)) is not None
    }
    found = {}
    for file, digest in digests.items():
        name = module_of.get(file)
        if name is None or digest is None:
            raise NotStorable(f"it was traced through {file}, which is no source file of an imported module")
        if _digest(file) != digest:
            raise NotStorable(f"{file} changed while it was compiled")
        found[name] = digest
    return found


def changed_module(digests: Mapping[str, str]) -> str | None:
    """The first module whose source is not what `by_module` found; None: all are."""
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
