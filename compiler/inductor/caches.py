"""Private folders for the own caches of Inductor and Triton while piecegraph compiles and loads.

`TORCHINDUCTOR_CACHE_DIR` covers most files, but not the header of generated C++: Inductor precompiles that header into
a folder of /tmp named after the user, so whoever creates that folder first can put code into every kernel. Precompiling
is worthwhile (6 s once, 4 s less for each kernel), so the header goes to a folder of this process and its compile
processes, and so does the library that tests which vector instructions work (3 s).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from piecegraph.compiler.common.private_folder import private_folder

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps the working directory off the import path of Python child processes."""

_environment_lock = threading.RLock()


@contextlib.contextmanager
def inductor_cache_dir(directory: Path, triton: Path) -> Iterator[None]:
    """Put Inductor's and Triton's own caches into these folders inside this block.

    Files that are built once per process go to a folder of this process. The settings are global to the process, so one
    thread at a time can be inside; they are restored at the end.
    """
    with (
        _environment_lock,
        _environment({_INDUCTOR: str(directory), _TRITON: str(triton)}),
        built_once_in(_once_folder()),
    ):
        yield


def child_environment(cache_dir: Path, triton: Path) -> dict[str, str]:
    """Return the environment of a compile child process: this process's, with these cache folders and import path."""
    return {
        **os.environ,
        **_SAFE_PATH,
        "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
        _INDUCTOR: str(cache_dir),
        _TRITON: str(triton),
    }


def child_arguments() -> tuple[str, ...]:
    """Return the arguments of a compile child process: the folder for files that are built once."""
    return (str(_once_folder()),)


def _once_folder() -> Path:
    return _once_folder_of(os.getpid())


@functools.cache
def _once_folder_of(pid: int) -> Path:
    """Return the folder of the process `pid`, so that a forked process makes its own."""
    return private_folder("once")


@contextlib.contextmanager
def built_once_in(folder: Path) -> Iterator[None]:
    """Make Inductor precompile headers and test vector instructions in `folder` inside this block.

    Headers precompiled elsewhere are not used. Inductor's behavior is restored at the end of the block.
    """
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import VecISA

    headers = folder / "headers"
    check_build = VecISA.check_build

    def check_build_there(isa: VecISA, code: str) -> bool:
        with _environment(
            {_INDUCTOR: str(folder), **_SAFE_PATH}
        ):  # the check loads the built library in a child Python process
            return check_build(isa, code)

    with (
        _attribute(codecache, "_HEADER_DIR", str(headers)),
        _attribute(codecache, "_HEADER_LOCK_DIR", str(headers / "locks")),
        _attribute(codecache, "_precompile_header", _precompile_header_in(folder)),
        _attribute(VecISA, "check_build", check_build_there),
    ):
        yield


@functools.cache
def _precompile_header_in(folder: Path) -> Callable[..., str]:
    """Return Inductor's function with a separate cache of header paths for `folder`."""
    from torch._inductor import codecache

    function: Any = codecache._precompile_header
    return functools.cache(function.__wrapped__)


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
