"""Launches of a Triton kernel: the ordinary one, and one that is prepared once and then takes next to no host time.

`kernel[grid](...)` binds names, specialises every argument and looks the compiled kernel up, 10-20 us
a call. A `PreparedKernel` has done that once; its launch is one call into Triton's launcher in C. Only this file
knows how that launcher is called, which is the same in Triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from piecegraph.passes.kernels.common.own_kernel import NotKept, loading_only, may_be_kept
from piecegraph.runner.attention.triton.kernels.node_format import NodeFormat, node_format

Grid = tuple[int, int, int]

MAX_WORKERS = 8
"""The most kernels that are compiled at a time."""


class KernelCall(NamedTuple):
    """A kernel with its grid and arguments."""

    kernel: Any  # a function under `triton.jit`
    grid: Grid
    arguments: dict[str, Any]  # by the names of the kernel's parameters, all of them and in order
    options: dict[str, Any]  # Triton's own: num_warps and the like

    def launch(self) -> None:
        """Launch the kernel as Triton does, unless the grid is empty; compiles it at the first call of its kind."""
        if min(self.grid) > 0:
            self.kernel[self.grid](**self.arguments, **self.options)


Run = Callable[[Grid, int, list[Any]], None]
"""A function of grid, stream, and all of the kernel's arguments in order, constants included, that launches it."""


class CompiledForLaunch(NamedTuple):
    """A compiled kernel: how it is launched, and how a graph's node is set to it."""

    run: Run
    node: NodeFormat | str  # a text says why no node can be set to it


class PreparedKernel:
    """A compiled kernel and its arguments, some of which a launch replaces. Made by `KernelPreparer`."""

    def __init__(self, compiled: CompiledForLaunch, values: list[Any], places: tuple[int, ...]) -> None:
        self._run = compiled.run
        self._node = compiled.node
        self._values = values
        self._places = places  # positions of the arguments that a launch replaces

    def launch(self, grid: Grid, stream: int, *changed: int) -> None:
        """Launch on `stream`, a CUDA stream's handle; `changed` are the arguments that `changing` named, in order."""
        values = self._values
        for place, value in zip(self._places, changed, strict=True):
            values[place] = value
        self._run(grid, stream, values)

    @property
    def unpatchable_reason(self) -> str | None:
        """The reason why no node of a graph can run this kernel, or None."""
        return self._node if isinstance(self._node, str) else None

    def patch(self, graph_exec: int, node: int, grid: Grid, *changed: int) -> None:
        """Have a kernel node of an instantiated graph do what `launch` does, from the next replay on."""
        values = self._values
        for place, value in zip(self._places, changed, strict=True):
            values[place] = value
        assert not isinstance(self._node, str), self._node
        self._node.patch(graph_exec, node, grid, values)


class KernelPreparer:
    """A maker of prepared kernels, which compiles once for calls that can share a compiled kernel.

    An argument that a launch replaces must not be one the kernel was specialised on: it is an integer the kernel
    names in `do_not_specialize`, or a pointer in `do_not_specialize_on_alignment`. A pointer is passed as an
    address, `tensor.data_ptr()`, so that the launcher need not query it.
    """

    def __init__(self) -> None:
        self._forms: dict[tuple[object, ...], _Form] = {}
        self._alike: dict[Hashable, _AlikeCalls] = {}

    def prepare(self, call: KernelCall, changing: Sequence[str]) -> PreparedKernel:
        """Prepare `call` without launching it. `changing`: the arguments that each launch passes, in this order."""
        return self.prepare_all([(call, changing)])[0]

    def prepare_alike(
        self,
        kind: Hashable,
        tensors: Mapping[str, torch.Tensor | None],
        make_call: Callable[[], KernelCall],
        changing: Sequence[str],
    ) -> PreparedKernel:
        """Prepare `make_call()`, which is called for the first of all calls of equal `kind` only.

        Such calls differ in nothing but the addresses of `tensors`, by the names of the kernel's arguments. A further
        one takes the arguments of the first, with its own addresses: equal layers cost next to nothing. A call with
        another tensor, which no launch replaces, is prepared for itself.
        """
        alike = self._alike.get(kind)
        if alike is not None:
            return alike.prepared(tensors)
        call = make_call()
        (each,) = self._specialized([(call, changing)])
        names, given = list(call.arguments), list(call.arguments.values())
        if all(given[place] is tensors.get(names[place]) for place in each.form.tensors):
            sources = tuple((place, names[place]) for place in each.form.tensors)
            self._alike[kind] = _AlikeCalls(each.compiled, each.values.copy(), each.form.changing, sources)
        return PreparedKernel(each.compiled, each.values, each.form.changing)

    def prepare_all(self, calls: Sequence[tuple[KernelCall, Sequence[str]]]) -> list[PreparedKernel]:
        """Do what `prepare` does for each of `calls`, in order; compiles in parallel what has to be compiled."""
        return [PreparedKernel(each.compiled, each.values, each.form.changing) for each in self._specialized(calls)]

    def _specialized(self, calls: Sequence[tuple[KernelCall, Sequence[str]]]) -> list[_SpecializedCall]:
        """Return the calls with the compiled kernels that they need; compiles those that are missing."""
        specialized = [self._specialize(call, changing) for call, changing in calls]
        missing = {
            (id(each.form), each.kind): (call, each.form)
            for (call, _), each in zip(calls, specialized, strict=True)
            if each.kind not in each.form.compiled
        }
        done = _compile_all([call for call, _ in missing.values()])
        for ((_, kind), (_, form)), compiled in zip(missing.items(), done, strict=True):
            form.compiled[kind] = compiled
        return specialized

    def _specialize(self, call: KernelCall, changing: Sequence[str]) -> _SpecializedCall:
        names, values = tuple(call.arguments), list(call.arguments.values())
        types = tuple(map(type, values))
        # By id: Triton's kernels hash their source, whose digest changes once the functions they call have theirs.
        key = (id(call.kernel), names, types, tuple(changing))
        form = self._forms.get(key)
        if form is None:
            assert names == tuple(param.name for param in call.kernel.params), (names, call.kernel)
            form = self._forms[key] = _Form.of(call.kernel, names, types, changing)
        return _SpecializedCall(form, (*call.options.items(), *form.take_addresses(values)), values)


class _Form(NamedTuple):
    """Calls of one kernel whose arguments have the same types and whose launches replace the same arguments.

    A capture prepares tens of thousands of calls of a few forms: what only depends on the form is computed once.
    """

    kernel: object  # kept alive, so that no other kernel has its id
    tensors: tuple[int, ...]  # positions of tensors that no launch replaces
    changing_tensors: tuple[int, ...]
    changing: tuple[int, ...]  # positions in the order in which a launch passes the arguments
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
        """Replace the tensors in `values` by their addresses.

        Returns everything that Triton may specialise a kernel of this form on, at least as fine as Triton's own key;
        types are part of the form.
        """
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


class _SpecializedCall(NamedTuple):
    """A call and the compiled kernel that it needs."""

    form: _Form
    kind: tuple[object, ...]  # key of the compiled kernel in `form.compiled`
    values: list[Any]  # all arguments, with addresses for tensors

    @property
    def compiled(self) -> CompiledForLaunch:
        """The compiled kernel, once it is there."""
        return self.form.compiled[self.kind]


class _AlikeCalls(NamedTuple):
    """Calls of one compiled kernel that differ in the addresses of some tensors only."""

    compiled: CompiledForLaunch
    values: list[Any]  # of the first call
    changing: tuple[int, ...]  # positions of the arguments that a launch replaces
    sources: tuple[tuple[int, str], ...]  # positions and names of the tensors that differ

    def prepared(self, tensors: Mapping[str, torch.Tensor | None]) -> PreparedKernel:
        """Return the call with the addresses of `tensors`."""
        values = self.values.copy()
        for place, name in self.sources:
            tensor = tensors[name]
            assert tensor is not None, name
            values[place] = tensor.data_ptr()
        return PreparedKernel(self.compiled, values, self.changing)


def _compile_all(calls: Sequence[KernelCall]) -> list[CompiledForLaunch]:
    """Load the kernels that are stored, and compile the others.

    Loading is Python code, so kernels are loaded one after the other: threads would wait for each other. Most of
    compiling is not, so several kernels are compiled in threads.
    """
    loaded = [_load(call) for call in calls]
    missing = [call for call, compiled in zip(calls, loaded, strict=True) if compiled is None]
    done = iter(_compile_in_threads(missing))
    return [next(done) if compiled is None else compiled for compiled in loaded]


def _load(call: KernelCall) -> CompiledForLaunch | None:
    """Load a stored kernel; return None if it has to be compiled."""
    if not may_be_kept(call.kernel):
        return None
    try:
        with loading_only():
            return _compile(call)
    except NotKept:
        return None


def _compile_in_threads(calls: Sequence[KernelCall]) -> list[CompiledForLaunch]:
    if len(calls) < 2:
        return [_compile(call) for call in calls]
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def compile_one(call: KernelCall) -> CompiledForLaunch:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread's current device is the first
        return _compile(call)

    with ThreadPoolExecutor(max_workers=min(MAX_WORKERS, len(calls))) as pool:
        return list(pool.map(compile_one, calls))


def _compile(call: KernelCall) -> CompiledForLaunch:
    compiled = call.kernel.warmup(*call.arguments.values(), grid=call.grid, **call.options)
    run = _run_compiled(compiled)
    if run is None:
        return CompiledForLaunch(_run_by_name(call), "this Triton's kernels have no launcher we know")
    return CompiledForLaunch(run, node_format(compiled, list(call.arguments)))


def _run_compiled(compiled: Any) -> Run | None:
    """Return a function that launches a compiled kernel; None where this Triton's launcher has another interface."""
    if not all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata", "_init_handles")):
        return None
    compiled._init_handles()  # loads the binary, so that `function` is there
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def run(grid: Grid, stream: int, values: list[Any]) -> None:
        # grid, stream, function, metadata, launch metadata, hooks on entry and exit, arguments
        launcher(grid[0], grid[1], grid[2], stream, function, metadata, None, None, None, *values)

    return run


def _run_by_name(call: KernelCall) -> Run:
    """Return a function that launches a kernel as Triton does, on the current stream."""
    kernel, options = call.kernel, call.options
    dtypes = {name: x.dtype for name, x in call.arguments.items() if isinstance(x, torch.Tensor)}
    names = tuple(call.arguments)

    def run(grid: Grid, stream: int, values: list[Any]) -> None:
        arguments = dict(zip(names, values, strict=True))
        kernel[grid](
            **arguments | {name: _AddressAsTensor(arguments[name], dtype) for name, dtype in dtypes.items()}, **options
        )

    return run


class _AddressAsTensor:
    """An address that Triton accepts as a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address
