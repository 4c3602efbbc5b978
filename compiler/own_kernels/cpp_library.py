"""Our kernels in C++ for a CPU: a library for each source, built once and kept in the cache, with an entry of its own.

The key has the source, the flags, the name that CXX gives the compiler, and the machine with its instructions. The
version of the compiler is noted beside it and not in it, so that a machine that has lost its compiler finds what an
earlier start built. Products of int8 have the same bits by every compiler; attention's sums may differ in the last
place. Processes that build at the same time each make a library, and the last one saves its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from piecegraph import environment
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.keys import key_of
from piecegraph.compiler.common.private_folder import private_folder, scratch_folder
from piecegraph.compiler.keys.machine_factors import machine_factors
from piecegraph.compiler.store.compile_cache import CompileCache

logger = logging.getLogger(__name__)

FORMAT = 1
"""The version of the format of entries; part of every key."""

ROLE = "library"

FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")
"""No product is fused with a sum unless the source says so (`std::fma`)."""

TIMEOUT_S = 120.0


class NoLibrary(Exception):
    """A library cannot be built here; the message says why."""


def library_of(source: Path, cache: CompileCache, flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """Load the library of `source` from `cache`, or build it and add it there. Raises `NoLibrary`."""
    try:
        return _loaded_or_built(source, cache, flags)
    except OSError as error:  # for example where no library may be loaded from the folder of temporary files
        raise NoLibrary(str(error)) from error


def _loaded_or_built(source: Path, cache: CompileCache, flags: Sequence[str]) -> ctypes.CDLL:
    text = source.read_bytes()
    factors = library_factors(text, flags)
    key = key_of(factors)
    found = cache.load(key)
    if found is not None and ROLE in found.blobs:
        try:
            return _load(found.blobs[ROLE], source.stem)
        except OSError as error:  # for example built where a library is that this machine lacks
            cache.reject(key, f"loading its library: {error}")
    start = time.perf_counter()
    compiler, library = _build(text, source.name, flags)
    loaded = _load(library, source.stem)
    seconds = time.perf_counter() - start
    logger.info("built %s by %s in %.1f s", source.name, compiler, seconds)
    entry = Entry.of(
        factors,
        {ROLE: library},
        created=time.time(),
        seconds={"compile": seconds},
        versions=cache.versions(),
        notes={"source": source.name, "compiler": compiler},
    )
    cache.save(entry, {ROLE: library})
    return loaded


def library_factors(source: bytes, flags: Sequence[str] = FLAGS) -> Mapping[str, Any]:
    """Return the key factors of the library that `source` is built to."""
    return {
        "kind": "library",
        "format": FORMAT,
        "source": hashlib.sha256(source).hexdigest(),
        "flags": list(flags),
        "cxx": environment.read("CXX"),
        "machine": machine_factors(torch.device("cpu")),
    }


def _load(library: bytes, name: str) -> ctypes.CDLL:
    """Load the bytes of a library, which are authenticated or have just been built, from a private folder."""
    file = private_folder("library") / f"{name}.so"
    file.write_bytes(library)
    return ctypes.CDLL(str(file))


def _build(source: bytes, name: str, flags: Sequence[str]) -> tuple[str, bytes]:
    """Return the version of the compiler that Inductor uses, and the library. Raises `NoLibrary`."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except Exception as error:  # it has a class of its own for this, and others for broken compilers
        if environment.is_set("CXX"):
            named = environment.read("CXX") or ""
            raise NoLibrary(
                f"CXX={named!r} is no C++ compiler that runs; name one program there, without arguments, or unset it"
            ) from error
        raise NoLibrary("there is no C++ compiler (Debian: apt-get install g++; or name one in CXX)") from error
    with scratch_folder() as folder:
        (folder / name).write_bytes(source)
        library = folder / "library.so"
        try:
            version = _run([compiler, "--version"], folder).partition("\n")[0]
            _run([compiler, *flags, str(folder / name), "-o", str(library)], folder)
            return version, library.read_bytes()
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
            raise NoLibrary(f"{compiler} failed: {lines[0][:200]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoLibrary(f"{compiler} failed: {error}") from error


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    return done.stdout
