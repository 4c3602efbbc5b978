"""Launching a Triton kernel: as Triton does it, or prepared once and then with next to no work on the host.

`kernel[grid](...)` binds names, specialises every argument and looks the compiled kernel up, 10-20 us
a call. A `PreparedKernel` did that once; its launch is one call into Triton's launcher in C. This file
alone knows how that one is called, which is the same in Triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from piecegraph.passes.kernels.own_kernel import NotKept, loading_only, may_be_kept
from piecegraph.runner.attention.kernels.node_format import NodeFormat, node_format

Grid = tuple[int, int, int]

MAX_WORKERS = 8
"""Kernels that are compiled at a time."""


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


Run = Callable[[Grid, int, list[Any]], None]
"""Grid, stream, and all of the kernel's arguments in order, constants included."""


class CompiledForLaunch(NamedTuple):
    """A compiled kernel: how it is launched, and how a graph's node becomes it."""

    run: Run
    node: NodeFormat | str  # or why no node can


class PreparedKernel:
    """A compiled kernel and its arguments, some of which a launch replaces. Made by `KernelPreparer`."""

    def __init__(
        self, compiled: CompiledForLaunch, values: list[Any], places: tuple[int, ...], tensors: tuple[int, ...]
    ) -> None:
        self._compiled = compiled
        self._run = compiled.run
        self._node = compiled.node
        self._values = values
        self._places = places  # of what a launch replaces
        self._tensors = tensors  # places of addresses that stay

    def launch(self, grid: Grid, stream: int, *changed: int) -> None:
        """`stream`: the CUDA stream's handle. `changed`: as `changing` named them."""
        values = self._values
        for place, value in zip(self._places, changed, strict=True):
            values[place] = value
        self._run(grid, stream, values)

    def moved(self, move: Callable[[int], int]) -> PreparedKernel:
        """The same over other tensors, each aligned as its own is: `move` takes an address to the other's."""
        values = self._values.copy()
        for place in self._tensors:
            values[place] = move(values[place])
        return PreparedKernel(self._compiled, values, self._places, self._tensors)

    @property
    def unpatchable_reason(self) -> str | None:
        """Why no node of a graph can become it, or None."""
        return self._node if isinstance(self._node, str) else None

    def patch(self, graph_exec: int, node: int, grid: Grid, *changed: int) -> None:
        """What `launch` does, by a kernel node of an instantiated graph from its next replay on."""
        values = self._values
        for place, value in zip(self._places, changed, strict=True):
            values[place] = value
        assert not isinstance(self._node, str), self._node
        self._node.patch(graph_exec, node, grid, values)


class KernelPreparer:
    """Makes prepared kernels, and compiles once for calls that can share a compiled kernel.

    What a launch replaces must not be something the kernel was specialised on: it is an integer the kernel
    names in `do_not_specialize`, or a pointer in `do_not_specialize_on_alignment`. A pointer is given as an
    address, `tensor.data_ptr()`: the launcher then asks nobody about it.
    """

    def __init__(self) -> None:
        self._forms: dict[tuple[object, ...], _Form] = {}

    def prepare(self, call: KernelCall, changing: Sequence[str]) -> PreparedKernel:
        """Launches nothing. `changing`: the arguments that each launch gives, in this order."""
        return self.prepare_all([(call, changing)])[0]

    def prepare_all(self, calls: Sequence[tuple[KernelCall, Sequence[str]]]) -> list[PreparedKernel]:
        """`prepare` of each, in order. What has to be compiled is compiled side by side."""
        asked = [self._ask(call, changing) for call, changing in calls]
        missing = {
            (id(each.form), each.kind): (call, each.form)
            for (call, _), each in zip(calls, asked, strict=True)
            if each.kind not in each.form.compiled
        }
        done = _compile_all([call for call, _ in missing.values()])
        for ((_, kind), (_, form)), compiled in zip(missing.items(), done, strict=True):
            form.compiled[kind] = compiled
        return [
            PreparedKernel(each.form.compiled[each.kind], each.values, each.form.changing, each.form.tensors)
            for each in asked
        ]

    def _ask(self, call: KernelCall, changing: Sequence[str]) -> _Asked:
        names, values = tuple(call.arguments), list(call.arguments.values())
        types = tuple(map(type, values))
        # by id: Triton's kernels hash their source, which has another digest before functions they call have theirs
        key = (id(call.kernel), names, types, tuple(changing))
        form = self._forms.get(key)
        if form is None:
            assert names == tuple(param.name for param in call.kernel.params), (names, call.kernel)
            form = self._forms[key] = _Form.of(call.kernel, names, types, changing)
        return _Asked(form, (*call.options.items(), *form.take_addresses(values)), values)


class _Form(NamedTuple):
    """Calls of one kernel whose arguments are of the same types and that change the same of them.

    A capture prepares tens of thousands of calls of a few forms: what only depends on the form is known here.
    """

    kernel: object  # kept, so that no other has its id
    tensors: tuple[int, ...]  # places of arguments that stay as they are
    changing_tensors: tuple[int, ...]
    changing: tuple[int, ...]  # in the order they are given in
    compiled: dict[tuple[object, ...], CompiledForLaunch]  # as many as kinds of layers and layouts

    @classmethod
    def of(cls, kernel: object, names: Sequence[str], types: Sequence[type], changing: Sequence[str]) -> _Form:
        tensors = [place for place, kind in enumerate(types) if issubclass(kind, torch.Tensor)]
        return cls(
            kernel=kernel,
            tensors=tuple(place for place in tensors if names[place] not in changing),
            changing_tensors=tuple(place for place in tensors if names[place] in changing),
            changing=tuple(map(names.index, changing)),
            compiled={},
        )

    def take_addresses(self, values: list[Any]) -> list[Any]:
        """Tensors in `values` become addresses. Returns what Triton may specialise a kernel of this form on, told
        apart at least as finely as it does: types are the form's."""
        kinds = values.copy()
        for place in self.changing:
            kinds[place] = None
        for place in self.tensors:
            x = values[place]
            values[place] = address = x.data_ptr()
            kinds[place] = x.dtype, x.device, address % 16
        for place in self.changing_tensors:
            x = values[place]
            values[place] = x.data_ptr()
            kinds[place] = x.dtype, x.device
        return kinds


class _Asked(NamedTuple):
    """A call whose kernel is wanted."""

    form: _Form
    kind: tuple[object, ...]  # which of the form's compiled kernels
    values: list[Any]  # of all arguments, addresses for tensors


def _compile_all(calls: Sequence[KernelCall]) -> list[CompiledForLaunch]:
    """Those that are kept are loaded one after the other, which is Python's work: threads would wait for each other.
    Others are compiled in threads, if there are several, for most of that is not."""
    loaded = [_load(call) for call in calls]
    missing = [call for call, compiled in zip(calls, loaded, strict=True) if compiled is None]
    done = iter(_compile_side_by_side(missing))
    return [next(done) if compiled is None else compiled for compiled in loaded]


def _load(call: KernelCall) -> CompiledForLaunch | None:
    """None: it is to be compiled."""
    if not may_be_kept(call.kernel):
        return None
    try:
        with loading_only():
            return _compile(call)
    except NotKept:
        return None


def _compile_side_by_side(calls: Sequence[KernelCall]) -> list[CompiledForLaunch]:
    if len(calls) < 2:
        return [_compile(call) for call in calls]
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def compile_one(call: KernelCall) -> CompiledForLaunch:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins with the first
        return _compile(call)

    with ThreadPoolExecutor(max_workers=min(MAX_WORKERS, len(calls))) as pool:
        return list(pool.map(compile_one, calls))


def _compile(call: KernelCall) -> CompiledForLaunch:
    compiled = call.kernel.warmup(*call.arguments.values(), grid=call.grid, **call.options)
    run = _run_compiled(compiled)
    if run is None:
        return CompiledForLaunch(_run_by_name(call), "this Triton's kernels have no launcher we know")
    return CompiledForLaunch(run, node_format(compiled, list(call.arguments)))


def current_stream(device: int) -> int:
    """The handle of torch's current stream on a device."""
    stream: int = driver.active.get_current_stream(device)
    return stream


def _run_compiled(compiled: Any) -> Run | None:
    """A function that launches a compiled kernel; None where this Triton's cannot be called as we know."""
    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata", "_init_handles")):
        return None
    compiled._init_handles()  # loads the binary, so that `function` is there
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def run(grid: Grid, stream: int, values: list[Any]) -> None:
        # grid, stream, function, metadata, launch metadata, hooks on entry and exit, arguments
        launcher(grid[0], grid[1], grid[2], stream, function, metadata, None, None, None, *values)

    return run


def _run_by_name(call: KernelCall) -> Run:
    """As Triton launches a kernel, on its current stream."""
    kernel, options = call.kernel, call.options
    dtypes = {name: x.dtype for name, x in call.arguments.items() if isinstance(x, torch.Tensor)}
    names = tuple(call.arguments)

    def run(grid: Grid, stream: int, values: list[Any]) -> None:
        arguments = dict(zip(names, values, strict=True))
        kernel[grid](**arguments | {name: _At(arguments[name], dtype) for name, dtype in dtypes.items()}, **options)

    return run


class _At:
    """An address that Triton takes for a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address
