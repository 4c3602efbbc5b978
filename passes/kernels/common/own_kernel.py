"""A mark for this package's kernels, so that their compilation can be replaced and no other kernel's is.

Triton keeps what it compiled for each function under `triton.jit` and each GPU. Before it compiles for a GPU, it asks
the function for `create_binder()`, which leaves Triton's compiler at the function's `compile`. For a marked function
our compiler is put there instead. This holds for Triton 3.6 to 3.9.

Triton compiles marked kernels as it does others until `compile_with` is called.
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
"""A replacement of `triton.compile(src, target=..., options=..., ...)`, which takes `triton.compile` as a first
argument."""


PARSE_ATTEMPTS = 8
"""How often a text is parsed that another thread may disturb; each time that is unlikely."""


class NotKept(Exception):
    """The error that a kernel would have to be compiled inside `loading_only`."""


_loads_only: ContextVar[bool] = ContextVar("loads_only", default=False)


class _Choice:
    """The compiler of marked kernels, process-wide like Triton's compiled kernels."""

    compile: CompileKernel | None = None


def own_kernel(kernel: Kernel) -> Kernel:
    """Mark a kernel; a decorator above `triton.jit`. Kernels that Triton's interpreter runs are left unchanged."""
    marked: Any = kernel
    if not hasattr(marked, "create_binder"):
        return kernel

    def first_of_device() -> Any:
        for function in (*functions_called(marked), marked):
            parse_beside_others(function)
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
    """Make marked kernels that have to be compiled raise `NotKept`, in this thread.

    The kernels that are kept can so be loaded, which is Python's work, before threads compile the others, which is not.
    """
    token = _loads_only.set(True)
    try:
        yield
    finally:
        _loads_only.reset(token)


def refuse_to_compile(src: Any) -> None:
    """Raise `NotKept` inside `loading_only`. A compiler of kernels calls this first."""
    if _loads_only.get():
        raise NotKept(src.name)


def may_be_kept(kernel: object) -> bool:
    """Return whether a kernel is marked and a compiler was chosen with `compile_with`."""
    return _Choice.compile is not None and isinstance(getattr(kernel, "device_caches", None), _ByDevice)


def hash_functions_called(kernel: Any) -> None:
    """Make Triton hash all functions that a kernel calls, the innermost first.

    Triton 3.6 puts constants that a called function reads into the caller's hash if that function was hashed before,
    and leaves them out otherwise. A kernel then had one hash where it was the first to be compiled, and another where
    another kernel with the same function came first, so neither Triton's cache nor ours found it.
    """
    for called in functions_called(kernel):
        _ = called.cache_key


def functions_called(kernel: Any) -> list[Any]:
    """Return the Triton functions that a kernel calls, directly or through others, the innermost first."""
    found: dict[int, Any] = {}
    _add_called(kernel, {id(kernel)}, found)
    return list(found.values())


def _add_called(function: Any, seen: set[int], found: dict[int, Any]) -> None:
    for called in _called(function):
        if id(called) not in seen:
            seen.add(id(called))
            _add_called(called, seen, found)
            found[id(called)] = called


def parse_beside_others(function: Any) -> None:
    """Make a Triton function parse its text again where Python's parser fails because another thread parses.

    Python 3.11 and 3.12 count the depth of the syntax trees they build once for all threads. A thread that runs in the
    middle of another's `ast.parse`, which garbage collection allows, leaves a wrong count, and the other's ends with a
    `SystemError` although its tree is complete. Kernels are compiled by several threads at a start. Triton would also
    keep the unfinished hash that it had set aside for the function.
    """
    parse = type(function).parse

    def parse_again() -> Any:
        for _ in range(PARSE_ATTEMPTS - 1):
            with contextlib.suppress(SystemError):
                return parse(function)
        return parse(function)

    function.parse = parse_again


def _called(function: Any) -> list[Any]:
    """Return the Triton functions that this one may call: names in its code, its own and those of its modules."""
    from triton import JITFunction

    names = function.fn.__code__.co_names
    found = [function.fn.__globals__.get(name) for name in names]
    modules = [each for each in found if isinstance(each, ModuleType)]
    found += [getattr(module, name, None) for module in modules for name in names]
    return [each for each in found if isinstance(each, JITFunction)]


class _ByDevice(dict[Any, Any]):
    """A mapping whose values are made once for each device, even if several threads ask at once."""

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
    """Make `chosen` the compiler of marked kernels that are not compiled yet; None restores Triton's."""
    _Choice.compile = chosen
