"""Kernels that start before the preceding kernel in the stream has ended.

With CUDA's programmatic dependent launch, a kernel's first instructions, such as loads of weights, run while the
preceding kernel still works; `gdc_wait` then waits until the preceding kernel's results are there. Nothing that may
still run may write what a kernel reads before that wait. Inside a CUDA graph of a model nothing writes weights, and a
graph starts when all work before it is done; outside of a graph a caller may have changed a weight a moment ago. So
kernels overlap while a graph is being captured, and are ordinary launches of the same binary otherwise.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from piecegraph.passes.kernels.common.gpu_limits import gpu_limits

Grid = tuple[int, int, int]


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream on a device."""
    stream: int = driver.active.get_current_stream(device)
    return stream


class _Compiled(NamedTuple):
    """A compiled kernel's function, and Triton's launchers for it."""

    function: Any
    metadata: Any
    ordinary: Any
    overlapping: Any


class OverlappedKernel:
    """A function under `triton.jit`, compiled once for everything Triton specialises it on.

    The function's parameters are tensors and numbers first, then constants, the last of which is `OVERLAP`: whether the
    kernel contains the instructions. A launch costs the host a few microseconds, where `kernel[grid](...)` takes tens.
    For tensors on the CPU the kernel is called directly, which works in Triton's interpreter.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[object, ...], _Compiled] = {}
        self._compiling: dict[tuple[object, ...], threading.Lock] = {}  # kernels are compiled ahead in threads

    def launch(
        self,
        grid: Grid,
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        *,
        num_warps: int,
        num_stages: int = 3,
        may_overlap: bool = True,
    ) -> None:
        """Launch the kernel on torch's current stream.

        `may_overlap`: false if the preceding kernel may write what this one reads before it waits.

        `arguments` are tensors of one device, None or numbers; the first is a tensor. `constants` are in the order of
        the kernel's parameters.
        """
        first = arguments[0]
        if not first.is_cuda:
            names = list(self.kernel.arg_names)[len(arguments) :]
            assert [*constants, "OVERLAP"] == names, f"constants are {[*constants]}, and the kernel takes {names}"
            self.kernel[grid](*arguments, **constants, OVERLAP=False)
            return
        device = first.get_device()
        key = (device, *map(_kind, arguments), *constants.values(), num_warps, num_stages)
        compiled = self._compiled.get(key)
        if compiled is None:
            with self._compiling.setdefault(key, threading.Lock()):
                compiled = self._compiled.get(key)
                if compiled is None:
                    compiled = self._compiled[key] = self._compile(
                        grid, arguments, constants, gpu_limits(device).can_overlap, num_warps, num_stages
                    )
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        run = compiled.overlapping if may_overlap and torch.cuda.is_current_stream_capturing() else compiled.ordinary
        stream = current_stream(device)
        # launch metadata and hooks on entry and exit: none; constants are passed and ignored
        run(*grid, stream, compiled.function, compiled.metadata, None, None, None, *values, *constants.values(), True)

    def _compile(
        self,
        grid: Grid,
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        overlap: bool,
        num_warps: int,
        num_stages: int,
    ) -> _Compiled:
        options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if overlap:
            options["launch_pdl"] = True
        compiled = self.kernel.warmup(*arguments, *constants.values(), overlap, grid=grid, **options)
        compiled._init_handles()  # loads the binary, so that `function` is there
        ordinary = copy.copy(compiled.run)
        ordinary.launch_pdl = False
        return _Compiled(compiled.function, compiled.packed_metadata, ordinary, compiled.run)


def _kind(x: Any) -> object:
    """Return what Triton may specialise a kernel on, at least as fine as Triton's own distinction."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x % 16 == 0, x == 1, x.bit_length() > 31
    return type(x)
