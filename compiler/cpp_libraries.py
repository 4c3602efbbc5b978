"""Inductor's C++ kernels: loaded from files of ours, or built and told of."""

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
    """Inside this block a C++ kernel is loaded from `known`, where its `library_digest` is there; what Inductor builds
    instead is added to the mapping yielded. Inside `inductor_cache_dir`, whose lock keeps other threads out."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    built: dict[str, Path] = {}
    original = CppPythonBindingsCodeCache.__dict__[_LOAD_LIBRARY]

    def load(cls: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        digest = library_digest(cls.__name__, args, kwargs)
        if digest in known:
            library = cls._load_library(str(known[digest]), f"piecegraph_{digest}")
            return lambda: getattr(library, cls.entry_function)
        future = original.__get__(None, cls)(*args, **kwargs)

        def built_one() -> Any:
            kernel = future()
            file = getattr(sys.modules.get(getattr(kernel, "__module__", "") or ""), "__file__", None)
            file = file or getattr(getattr(kernel, "__self__", None), "__file__", None)
            if file is not None:
                built[digest] = Path(file)
            return kernel

        return built_one

    setattr(CppPythonBindingsCodeCache, _LOAD_LIBRARY, classmethod(load))
    try:
        yield built
    finally:
        setattr(CppPythonBindingsCodeCache, _LOAD_LIBRARY, original)


def library_digest(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """sha256 of all that a C++ kernel is asked for by, hex: source, argument types, device and flags."""
    named = sorted((name, repr(value)) for name, value in kwargs.items() if not callable(value))
    return hashlib.sha256(repr((kind, [repr(arg) for arg in args], named)).encode()).hexdigest()
