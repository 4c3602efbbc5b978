"""Differences between the supported versions of torch (2.11 to 2.15), and what hides them.

The rule: a name, an option or a fault that only some versions of torch have is handled here, and no other file names
a version of torch. Private modules that all versions share are used where their concept lies: `tracing/dynamo.py`,
`common/symbolic_sizes.py`, `inductor/`, `torch_compat/process_settings.py`, `graphs/recording/cuda_graph.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode

_patching = threading.RLock()


def source_name(source: Any) -> str:
    """Return the expression by which Dynamo found a value. Before torch 2.12 `Source.name` is a method."""
    name = source.name
    return str(name() if callable(name) else name)


def attribute_guard(source: Any) -> tuple[str, str] | None:
    """Return the owner's expression and the attribute of a HASATTR guard whose source is the attribute itself.

    torch 2.11 puts the guard on the attribute; later versions put it on the owner and name the attribute in the guard's
    details, for which the result is None.
    """
    base, member = getattr(source, "base", None), getattr(source, "member", None)
    return (source_name(base), member) if base is not None and isinstance(member, str) else None


@contextlib.contextmanager
def guard_standard_library() -> Iterator[None]:
    """Make Dynamo guard reads of the standard library's modules inside this block.

    Dynamo leaves them out otherwise, because it assumes that they never change; `os.environ` is in one of them.
    """
    from torch._dynamo import symbolic_convert

    is_stdlib = getattr(symbolic_convert, "is_stdlib", None)
    if is_stdlib is None:
        yield
        return
    with _patching:
        setattr(symbolic_convert, "is_stdlib", lambda module: False)  # noqa: B010
        try:
            yield
        finally:
            setattr(symbolic_convert, "is_stdlib", is_stdlib)  # noqa: B010


@contextlib.contextmanager
def guard_missing_attributes() -> Iterator[None]:
    """Make Dynamo guard, inside this block, whether modules and functions have the attributes that code asks for.

    It guards `hasattr(value, name)` and `getattr(value, name, default)` of objects, tensors and `nn.Module`s, and
    takes the present answer for a constant where `value` is a Python module or a function.
    """
    from torch._dynamo.variables import functions, misc

    kinds = (misc.PythonModuleVariable, functions.BaseUserFunctionVariable, functions.UserFunctionVariable)
    with _patching, contextlib.ExitStack() as patches:
        for kind in kinds:
            patches.enter_context(_guarding_hasattr(kind))
        yield


@contextlib.contextmanager
def _guarding_hasattr(kind: Any) -> Iterator[None]:
    """Make one kind of variable guard the answer. In torch 2.15 Python modules inherit the method."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    own, original = vars(kind).get("call_obj_hasattr"), kind.call_obj_hasattr
    is_on_owner = "attr" in inspect.signature(GuardBuilder.HASATTR).parameters  # not in torch 2.11

    def call_obj_hasattr(self: Any, tx: Any, name: str) -> Any:
        if self.source is not None and is_on_owner:
            install_guard(self.source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
        elif self.source is not None:
            install_guard(AttrSource(self.source, name).make_guard(GuardBuilder.HASATTR))
        return original(self, tx, name)

    kind.call_obj_hasattr = call_obj_hasattr
    try:
        yield
    finally:
        if own is None:
            del kind.call_obj_hasattr
        else:
            kind.call_obj_hasattr = own


def symbol_hint(shape_env: ShapeEnv, symbol: Any) -> int:
    """Return the hint of a backed symbol: the number it was made from. torch 2.11 calls the mapping `var_to_val`."""
    examples = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    return int(examples[symbol])


@contextlib.contextmanager
def allow_unbacked_layouts() -> Iterator[None]:
    """Let Inductor order the dims of a buffer with a flexible layout also where a stride has an unbacked size.

    Outside this block torch 2.11 to 2.15 ask for a hint there and raise `GuardOnDataDependentSymNode`, for a tensor
    that is both contiguous and channels-last (of one KV head, say). Any order is a valid layout for every size, so a
    guess is enough.
    """
    from torch._inductor.ir import FlexibleLayout
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    original = FlexibleLayout.same_ordered

    def same_ordered(sizes: Sequence[Any], stride: Sequence[Any]) -> Any:
        try:
            return original(sizes, stride)
        except GuardOnDataDependentSymNode:
            guessed = _guessed_sizes(V.graph.sizevars, stride)
            return FlexibleLayout.fill_ordered(sizes, sorted(range(len(guessed)), key=guessed.__getitem__))

    with _replaced(FlexibleLayout, "same_ordered", staticmethod(same_ordered)):
        yield


@contextlib.contextmanager
def compare_sizes_of_views_for_all_values() -> Iterator[None]:
    """Let Inductor index a view by sizes only where they are equal for all values of unbacked sizes.

    Outside this block torch 2.13 to 2.15 index a view of (4 * u0, 8) as (u0, 32) as if u0 were 1: an equality that
    cannot be decided becomes an assertion for the run, and the assertion is lost, so that numbers are wrong without a
    word. Where the equality fails, as it does here, Inductor goes by the position in memory.
    """
    from torch._inductor.ir import View
    from torch._inductor.virtualized import V

    view: Any = View
    if not hasattr(view, "_dynamic_reshape_indexer"):
        yield
        return
    original = view._dynamic_reshape_indexer

    def index(*args: Any, **kwargs: Any) -> Any:
        sizevars: Any = V.graph.sizevars

        def check_equals(left: Any, right: Any) -> Any:
            assert sizevars.statically_known_equals(left, right), f"{left} is not known to equal {right}"
            return left

        sizevars.check_equals = check_equals
        try:
            return original(*args, **kwargs)
        finally:
            del sizevars.check_equals

    with _replaced(view, "_dynamic_reshape_indexer", staticmethod(index)):
        yield


@contextlib.contextmanager
def undecided_layouts_are_copied() -> Iterator[None]:
    """Let Inductor lower `bmm` on a CPU where the layout of an operand depends on whether a size is 1.

    Outside this block torch 2.13 raises `GuardOnDataDependentSymNode` there, asking whether the operand's layout is one
    that the product takes without a copy. Contiguous operands are right for every size.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    keys = [key for key in (torch.ops.aten.bmm, torch.ops.aten.bmm.default) if key in lowerings]
    originals: dict[Any, Any] = {key: lowerings[key] for key in keys}

    def lowering(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def bmm(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(left, right, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                contiguous = map(ir.ExternKernel.require_contiguous, (left, right))
                return original(*contiguous, *args, **kwargs)

        return bmm

    with _patching:
        lowerings.update({key: lowering(original) for key, original in originals.items()})
        try:
            yield
        finally:
            lowerings.update(originals)


@contextlib.contextmanager
def undecided_constants_are_kept() -> Iterator[None]:
    """Let Inductor leave constants as they are where their layout depends on whether a size is 1.

    Outside this block torch 2.13 raises `GuardOnDataDependentSymNode` there, asking whether a tensor of one value that
    is folded is contiguous. What was folded before stays so: each node is replaced in one go.
    """
    from torch._inductor.fx_passes import joint_graph
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    original: Any = joint_graph.constant_fold_uniform_value

    def fold(graph_module: Any) -> None:
        try:
            original(graph_module)
        except GuardOnDataDependentSymNode:
            graph_module.graph.lint()

    with _replaced(joint_graph, "constant_fold_uniform_value", fold):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of torch inside this block; other threads wait to replace any until it is over."""
    with _patching:
        original = inspect.getattr_static(owner, name)  # a static method stays one
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, original)


@contextlib.contextmanager
def without_fake_tensor_cache(mode: FakeTensorMode | None) -> Iterator[None]:
    """Let fake values of `mode` be computed without torch's cache of such computations.

    In torch 2.13 to 2.15 an entry of the cache asks for the memory format of its result and raises
    `GuardOnDataDependentSymNode` where a stride with an unbacked size leaves it undecided.
    """
    if mode is None:
        yield
        return
    was_enabled, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = was_enabled


@contextlib.contextmanager
def undecided_layouts_are_contiguous() -> Iterator[None]:
    """Let fake values have contiguous strides where their memory format depends on whether a size is 1.

    In torch 2.13 to 2.15 one comparison of `are_strides_like_channels_last_or_false` raises
    `GuardOnDataDependentSymNode` for a tensor of shape (1, 1, num_tokens, 1), as half of two rotated numbers of one
    head has it. Formats differ there in strides of dims of size 1 only.
    """
    import torch._prims_common as prims
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    original = getattr(prims, "are_strides_like_channels_last_or_false", None)
    if original is None:
        yield
        return

    def are_strides_like_channels_last(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
        try:
            return bool(original(shape, strides))
        except GuardOnDataDependentSymNode:
            return False

    with _replaced(prims, "are_strides_like_channels_last_or_false", are_strides_like_channels_last):
        yield


def _guessed_sizes(sizevars: Any, sizes: Sequence[Any]) -> Sequence[int]:
    """Return guessed numbers for `sizes`, for choices that are right either way. torch 2.11 calls this `size_hints`."""
    from torch._inductor import config

    guess = sizevars.optimization_hints if hasattr(sizevars, "optimization_hints") else sizevars.size_hints
    guessed: Sequence[int] = guess(sizes, fallback=config.unbacked_symint_fallback)
    return guessed


_TUNED_AT_FIRST_RUN = {
    # standalone_compile would measure kernels while it compiles, on random inputs, in processes side by side.
    "triton.autotune_at_compile_time": False,
    # torch 2.11 bundles such a kernel with the configuration it had before it was tuned and, where that was the
    # only one, never looks for what tuning found: every process would tune again.
    "use_static_cuda_launcher": False,
}


def first_run_tuning_options() -> dict[str, Any]:
    """Return Inductor options under which kernels are tuned when they first run, and loaded tuned after that."""
    from torch._inductor import config

    known = config.get_config_copy()
    return {name: value for name, value in _TUNED_AT_FIRST_RUN.items() if name in known}


def graph_exec_handle(graph: torch.cuda.CUDAGraph) -> int:
    """Return the handle of an instantiated graph (torch 2.11 has the method, but its stubs lack it)."""
    handle: int = graph.raw_cuda_graph_exec()  # type: ignore[attr-defined,unused-ignore]
    return handle
