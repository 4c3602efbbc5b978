"""Inductor's C++ kernels: loaded from given files, or built by Inductor and recorded."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_LOAD_LIBRARY = "load_pybinding_async"


@contextlib.contextmanager
def cpp_libraries(known: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """Load a C++ kernel inside this block from `known` if its `library_digest` is there.

    Libraries that Inductor builds instead are added to the yielded mapping. Use it inside `inductor_cache_dir`, whose
    lock keeps other threads out.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    built: dict[str, Path] = {}
    original = CppPythonBindingsCodeCache.__dict__[_LOAD_LIBRARY]

    def load(cls: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        digest = library_digest(cls.__name__, args, kwargs)
        if digest in known:
            library = cls._load_library(str(known[digest]), f"piecegraph_{digest}")
            return lambda: getattr(library, cls.entry_function)
        future = original.__get__(None, cls)(*args, **kwargs)

        def wait_and_record() -> Any:
            kernel = future()
            file = getattr(sys.modules.get(getattr(kernel, "__module__", "") or ""), "__file__", None)
            file = file or getattr(getattr(kernel, "__self__", None), "__file__", None)
            if file is not None:
                built[digest] = Path(file)
            return kernel

        return wait_and_record

    setattr(CppPythonBindingsCodeCache, _LOAD_LIBRARY, classmethod(load))
    try:
        yield built
    finally:
        setattr(CppPythonBindingsCodeCache, _LOAD_LIBRARY, original)


def library_digest(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of everything that determines a C++ kernel: source, argument types, device and flags."""
    named = sorted((name, repr(value)) for name, value in kwargs.items() if not callable(value))
    return hashlib.sha256(repr((kind, [repr(arg) for arg in args], named)).encode()).hexdigest()
