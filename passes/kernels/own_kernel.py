"""Kernels of this package, so marked: who compiles them can be chosen, and nobody else's are touched.

Triton keeps, for each function under `triton.jit` and each GPU, what it compiled; where it begins to, it asks the
function for `create_binder()`, which leaves Triton's compiler at the function's `compile`. A marked function has
ours put in its place there. This holds for Triton 3.6 to 3.9.

Until somebody chooses (`compile_with`), Triton compiles them as it does others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

Kernel = TypeVar("Kernel")

CompileKernel = Callable[..., Any]
"""As `triton.compile(src, target=..., options=..., ...)`, behind a first argument: `triton.compile` itself."""


class NotKept(Exception):
    """A kernel would have to be compiled, inside `loading_only`."""


_loads_only: ContextVar[bool] = ContextVar("loads_only", default=False)


class _Choice:
    """Process-wide, as what Triton has compiled is."""

    compile: CompileKernel | None = None


def own_kernel(kernel: Kernel) -> Kernel:
    """A decorator, above `triton.jit`. What Triton's interpreter runs is left as it is."""
    marked: Any = kernel
    if not hasattr(marked, "create_binder"):
        return kernel

    def first_of_device() -> Any:
        hash_functions_called(marked)
        made = marked.create_binder()
        plain = marked.compile

        def compile_one(src: Any, **how: Any) -> Any:
            if _Choice.compile is not None:
                return _Choice.compile(plain, src, **how)
            refuse_to_compile(src)
            return plain(src, **how)

        marked.compile = compile_one
        return made

    marked.device_caches = _ByDevice(first_of_device)
    return kernel


@contextlib.contextmanager
def loading_only() -> Iterator[None]:
    """In this thread a marked kernel that has to be compiled raises `NotKept` instead. Who has many can so load those
    that are kept, which is Python's work, before threads compile the others, which is not."""
    token = _loads_only.set(True)
    try:
        yield
    finally:
        _loads_only.reset(token)


def refuse_to_compile(src: Any) -> None:
    """For who compiles, ahead of doing so: raises `NotKept` inside `loading_only`."""
    if _loads_only.get():
        raise NotKept(src.name)


def may_be_kept(kernel: object) -> bool:
    """Whether it is marked, and somebody chose how it is compiled."""
    return _Choice.compile is not None and isinstance(getattr(kernel, "device_caches", None), _ByDevice)


def hash_functions_called(kernel: Any) -> None:
    """Have Triton hash all functions that a kernel calls, those first that others call.

    Triton 3.6 puts constants that a called function reads into the caller's hash if that function was hashed before,
    and leaves them out otherwise: a kernel had one hash where it was the first to be compiled, and another where
    another kernel with the same function came first. Then neither Triton's cache nor ours finds it.
    """
    _hash_below(kernel, set())


def _hash_below(function: Any, seen: set[int]) -> None:
    seen.add(id(function))
    for called in _called(function):
        if id(called) not in seen:
            _hash_below(called, seen)
            _ = called.cache_key


def _called(function: Any) -> list[Any]:
    """Functions of Triton's that this one may call: names in its code, as its own and as those of modules in it."""
    from triton import JITFunction

    names = function.fn.__code__.co_names
    found = [function.fn.__globals__.get(name) for name in names]
    modules = [each for each in found if isinstance(each, ModuleType)]
    found += [getattr(module, name, None) for module in modules for name in names]
    return [each for each in found if isinstance(each, JITFunction)]


class _ByDevice(dict[Any, Any]):
    """What is made once for each device, though several threads ask at once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make
        self._lock = threading.Lock()

    def __missing__(self, device: Any) -> Any:
        with self._lock:
            if device not in self:
                self[device] = self._make()
            return self[device]


def compile_with(chosen: CompileKernel | None) -> None:
    """From now on `chosen` compiles marked kernels that are not compiled yet; None: Triton does."""
    _Choice.compile = chosen
