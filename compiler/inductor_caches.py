"""Where Inductor and Triton keep their own files while we compile and load: in folders of ours.

`TORCHINDUCTOR_CACHE_DIR` leads most of them there, but not the header that generated C++ begins with: Inductor
precompiles it into a folder of /tmp that is named for the user, and whoever makes that folder first puts code into
every kernel. It is worth precompiling (6 s once, 4 s less for each kernel), so it is led to a folder of this process
and its compile processes, and with it the library that tells which vector instructions work (3 s).
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

from piecegraph.compiler.private_folder import private_folder

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Of Python processes: no module is looked for in the folder that happens to be the working directory."""

_environment_lock = threading.RLock()


@contextlib.contextmanager
def inductor_cache_dir(directory: Path, triton: Path) -> Iterator[None]:
    """Inductor's and Triton's own caches live in these folders inside this block, and what is built once in that of
    this process; the process's settings are as before after it. One thread at a time: they are the process's."""
    with (
        _environment_lock,
        _environment({_INDUCTOR: str(directory), _TRITON: str(triton)}),
        built_once_in(_once_folder()),
    ):
        yield


def child_environment(cache_dir: Path, triton: Path) -> dict[str, str]:
    """This process's environment for a child that compiles: same import path, Inductor's and Triton's
    caches in these folders."""
    return {
        **os.environ,
        **_SAFE_PATH,
        "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
        _INDUCTOR: str(cache_dir),
        _TRITON: str(triton),
    }


def child_arguments() -> tuple[str, ...]:
    """What a child that compiles is called with: the folder of what is built once."""
    return (str(_once_folder()),)


def _once_folder() -> Path:
    return _once_folder_of(os.getpid())


@functools.cache
def _once_folder_of(pid: int) -> Path:
    """Of this process and not of one it was forked from."""
    return private_folder("once")


@contextlib.contextmanager
def built_once_in(folder: Path) -> Iterator[None]:
    """Inside this block Inductor precompiles headers, and tries out vector instructions, in `folder`, and uses none
    that it precompiled elsewhere. After it, what it does for others is as before."""
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import VecISA

    headers = folder / "headers"
    check_build = VecISA.check_build

    def check_build_there(isa: VecISA, code: str) -> bool:
        with _environment({_INDUCTOR: str(folder), **_SAFE_PATH}):  # it loads what it built in another Python
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
    """Inductor's own, which remembers where a header is, with a memory for `folder` alone."""
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
