"""The recording of a function on a CPU as the calls of our C++ kernels that it makes, like a CUDA graph's launches.

A replay makes the same calls with the same addresses, without the Python, the views and the allocations around them.
That computes the same only if nothing else computes: each op that torch runs meanwhile is looked at, also inside of
ours, and where one is neither one of ours that may be recorded (`define_op`), nor a view, nor an allocation, there is
no recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph.passes.kernels.common.cpp_kernel import KernelCall, recording_kernel_calls
from piecegraph.passes.ops.library import RECORDABLE
from piecegraph.passes.ops.op_types import OpOverload

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls of kernels that are all a function computes, and its result."""

    outputs: tuple[Any, ...]
    calls: tuple[KernelCall, ...]
    memory: tuple[torch.Tensor, ...]  # what the calls may write: it stays as long as they are made

    def replay(self) -> None:
        """Make the calls again. Raises `MemoryError` where a kernel finds no memory."""
        for function, arguments in self.calls:
            if function(*arguments):
                raise MemoryError("a kernel of a recorded graph found no memory")


def record_calls(run: Callable[[], Sequence[Any]]) -> RecordedCalls | None:
    """Run `run` and return its calls of kernels, or None if it computes anything else.

    `run` must use tensors by torch's ops alone: what other code does to their memory is not seen. An error propagates.
    """
    seen = _Seen()
    with recording_kernel_calls() as calls, seen:
        outputs = tuple(run())
    return None if seen.computes else RecordedCalls(outputs, tuple(calls), tuple(seen.memory))


class _Seen(TorchDispatchMode):
    """A mode that notes the memory that is allocated, and whether an op computes that is none of ours."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.memory: list[torch.Tensor] = []
        self.computes = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (implementation := RECORDABLE.get(func)) is not None:
            with self:  # what it calls is looked at, too
                return implementation(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.memory.append(result)
        elif not _is_view(func):
            self.computes = True
        return result


def _is_view(func: OpOverload) -> bool:
    """Return whether an op returns other tensors of its arguments' memory, and computes and changes nothing."""
    schema = func._schema
    written = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    return not written and bool(schema.returns) and all(each.alias_info is not None for each in schema.returns)
