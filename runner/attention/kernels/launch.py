"""Launching a Triton kernel: as Triton does it, or prepared once and then with next to no work on the host.

`kernel[grid](...)` binds names, specialises every argument and looks the compiled kernel up, 10-20 us
a call. A `PreparedKernel` did that once; its launch is one call into Triton's launcher in C. This file
alone knows how that one is called, which is the same in Triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

Grid = tuple[int, int, int]


class KernelCall(NamedTuple):
    """One launch of a kernel, not launched yet."""

    kernel: Any  # a function under `triton.jit`
    grid: Grid
    arguments: dict[str, Any]  # by the kernel's parameters, all of them and in order
    options: dict[str, Any]  # Triton's own: num_warps and the like

    def launch(self) -> None:
        """As Triton launches a kernel. Compiles it if it was not called like this before."""
        if min(self.grid) > 0:
            self.kernel[self.grid](**self.arguments, **self.options)


class PreparedKernel:
    """A compiled kernel and its arguments, some of which a launch replaces.

    What is replaced must not be something the kernel was specialised on: it is an integer the kernel
    names in `do_not_specialize`, or a pointer as well aligned as the one it was prepared with. A pointer
    is given as an address, `tensor.data_ptr()`: the launcher then asks nobody about it.
    """

    def __init__(self, call: KernelCall, changing: Sequence[str]) -> None:
        """Compiles, and launches nothing. `changing`: the arguments each launch gives, in this order."""
        names = list(call.arguments)
        assert names == [param.name for param in call.kernel.params], (names, call.kernel)
        compiled = call.kernel.warmup(*call.arguments.values(), grid=call.grid, **call.options)
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in call.arguments.values()]
        self._places = tuple(names.index(name) for name in changing)
        self._values = values
        self._launch = _launcher(compiled, call)

    def launch(self, grid: Grid, stream: int, *changed: int) -> None:
        """`stream`: the CUDA stream's handle. `changed`: as `changing` named them."""
        values = self._values
        for place, value in zip(self._places, changed, strict=True):
            values[place] = value
        self._launch(grid, stream, values)


def current_stream(device: int) -> int:
    """The handle of torch's current stream on a device."""
    stream: int = driver.active.get_current_stream(device)
    return stream


def _launcher(compiled: Any, call: KernelCall) -> Callable[[Grid, int, list[Any]], None]:
    """A function that launches `compiled` with all of the kernel's arguments, constants included."""
    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata", "_init_handles")):
        names, kernel, options = list(call.arguments), call.kernel, call.options

        def launch_by_name(grid: Grid, stream: int, values: list[Any]) -> None:
            addressed = [
                _At(value, old.dtype) if isinstance(old, torch.Tensor) else value
                for value, old in zip(values, call.arguments.values(), strict=True)
            ]
            kernel[grid](**dict(zip(names, addressed, strict=True)), **options)

        return launch_by_name
    compiled._init_handles()  # loads the binary, so that `function` is there
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(grid: Grid, stream: int, values: list[Any]) -> None:
        # grid, stream, function, metadata, launch metadata, hooks on entry and exit, arguments
        run(grid[0], grid[1], grid[2], stream, function, metadata, None, None, None, *values)

    return launch


class _At:
    """An address that Triton takes for a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address
