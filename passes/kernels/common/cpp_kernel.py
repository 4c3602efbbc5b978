"""A function of ours in C++ for a CPU: whether this process has it, and why not.

`compiler/own_kernels/cpp_library.py` builds or loads the libraries at the start of a model. The choice is one of the
process, because ops take tensors only. Until then, and where there is no library, torch's kernels compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

POINTER, NUMBER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
"""The types of arguments: the address of a tensor's first number, or None, and numbers of C."""

NOT_LOADED = "it was not loaded"

KernelCall = tuple[Callable[..., int], tuple[Any, ...]]
"""A function of a library and its arguments, most of them addresses."""


_recorded: ContextVar[list[KernelCall] | None] = ContextVar("piecegraph recorded kernel calls", default=None)


@contextmanager
def recording_kernel_calls() -> Iterator[list[KernelCall]]:
    """Yield a list of the calls that this thread makes by `CppKernel.run` inside the context, in their order."""
    calls: list[KernelCall] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


class CppKernel:
    """A function that returns 0, or another number where it failed, in a source file of its own."""

    def __init__(
        self,
        source: Path,
        name: str,
        arguments: Sequence[Any],
        *,
        instructions: Sequence[str] = (),
        probe: str = "",
    ) -> None:
        """Describe the function `name` of `source`, a C++ file, and the types of its arguments.

        `instructions`: those that it needs to be worth using, as Linux lists them. `probe`: a function of the library
        that returns 0 where the compiler did not know them.
        """
        self.source = source
        self.instructions = tuple(instructions)
        self.call: Callable[..., int] | None = None
        self.why_not = NOT_LOADED
        self._name, self._arguments, self._probe = name, list(arguments), probe

    def run(self, *arguments: Any) -> int:
        """Call the function, which must be there, and return its result.

        A call that is recorded may be made again with the same arguments, at any later time.
        """
        assert self.call is not None, self.why_not
        if (recorded := _recorded.get()) is not None:
            recorded.append((self.call, arguments))
        return self.call(*arguments)

    def function_of(self, library: ctypes.CDLL) -> Callable[..., int]:
        """Return the function in `library`. Raises `AttributeError` for a library of something else."""
        function: Any = getattr(library, self._name)
        function.argtypes, function.restype = self._arguments, ctypes.c_int
        return function  # type: ignore[no-any-return]  # ctypes' functions have no type

    def use(self, library: ctypes.CDLL) -> None:
        """Compute by `library` from now on. Raises `AttributeError` for a library of something else."""
        if self._probe and not getattr(library, self._probe)():
            self.do_without(f"the C++ compiler has no {' or '.join(self.instructions)}")
            return
        self.call, self.why_not = self.function_of(library), ""

    def do_without(self, why: str) -> None:
        """Compute by torch's kernels from now on; `why` is for people."""
        self.call, self.why_not = None, why
