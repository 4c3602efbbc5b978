"""How a traced module is called: what a call must look like, what its arguments become, how its result is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.tracing.dynamic_dims import (
    DynamicDims,
    bind_arguments,
    check_examples,
    declared_dims,
    leaf_paths,
)
from piecegraph.compiler.tracing.guards import GuardAudit
from piecegraph.errors import InputMismatch

NEGATED = "negated when it is read (`tensor.is_neg()`), and compiled code would read the numbers in its memory"
"""The text that refuses a tensor such as `z.conj().imag`, whose sign is not in its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLeaf:
    """The expected form of a tensor argument: everything but the declared sizes is fixed."""

    path: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | str, ...]  # str: the name of a declared size
    strides: tuple[int, ...] | None  # None: contiguous

    def check(self, value: Any, sizes: dict[str, int]) -> None:
        """Raise `InputMismatch` unless `value` fits, and add its declared sizes to `sizes`."""
        if not isinstance(value, torch.Tensor):
            raise InputMismatch(f"{self.path} is {type(value).__name__}; the compiled model takes a tensor there.")
        if value.dtype is not self.dtype:
            raise InputMismatch(
                f"{self.path} has dtype {value.dtype}; it was compiled for {self.dtype}. Convert it, or compile again."
            )
        if value.device != self.device:
            raise InputMismatch(
                f"{self.path} is on {value.device}; it was compiled for {self.device}. Move it there, or compile again."
            )
        if value.is_neg():
            raise InputMismatch(f"{self.path} is {NEGATED}. Call .resolve_neg() on it.")
        if value.ndim != len(self.shape):
            raise InputMismatch(f"{self.path} has shape {tuple(value.shape)}; wanted {self.describe()}.")
        for dim, (size, wanted) in enumerate(zip(value.shape, self.shape, strict=True)):
            if isinstance(wanted, str):
                if sizes.setdefault(wanted, size) != size:
                    raise InputMismatch(
                        f"{self.path}.shape[{dim}] is {size}, but {wanted} is {sizes[wanted]} in an earlier argument; "
                        "dims of one name are equal."
                    )
            elif size != wanted:
                raise InputMismatch(
                    f"{self.path} has shape {tuple(value.shape)}; wanted {self.describe()}. "
                    f"Declare dim {dim} in dynamic_dims if it varies."
                )
        strides_fit = value.is_contiguous() if self.strides is None else value.stride() == self.strides
        if not strides_fit:
            wanted_strides = "contiguous" if self.strides is None else f"with strides {self.strides}"
            raise InputMismatch(
                f"{self.path} has strides {value.stride()}; it was compiled {wanted_strides}. Call .contiguous() on it."
            )

    def describe(self) -> str:
        """Return the shape as text, with the names of declared sizes."""
        return "(" + ", ".join(map(str, self.shape)) + ("," if len(self.shape) == 1 else "") + ")"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLeaf:
    """The expected value of an argument that is not a tensor: the value is part of the trace."""

    path: str
    value: Any

    def check(self, value: Any, sizes: dict[str, int]) -> None:
        """Raise `InputMismatch` unless `value` is what was traced."""
        if value is not self.value and not _is_same(value, self.value):
            raise InputMismatch(
                f"{self.path} is {value!r}; the model was traced with {self.value!r}, and a value that is not a tensor "
                f"is part of the trace. Compile once for each value of {self.path}, or pass it as a tensor."
            )


def _is_same(one: Any, other: Any) -> bool:
    """Return whether no code can distinguish two values: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return bool(one == other)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """The expected arguments of a call, from one traced call."""

    signature: inspect.Signature
    leaves: tuple[TensorLeaf | ConstantLeaf, ...]
    tree: pytree.TreeSpec  # of the bound arguments
    is_flat: bool = field(default=False)  # every parameter is positional and a tensor: no tree to flatten

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, int]]:
        """Return the leaves of a call, in traced order, and its declared sizes by name.

        Raises `InputMismatch` where the call does not fit the trace.
        """
        if self.is_flat and not kwargs and len(args) == len(self.leaves):
            values = list(args)
        else:
            try:
                bound = bind_arguments(self.signature, args, kwargs)
            except TypeError as error:
                raise InputMismatch(f"{error}; the model takes {self.signature}.") from None
            values, tree = pytree.tree_flatten(dict(bound.arguments))
            if tree != self.tree:
                raise InputMismatch(f"the arguments are nested as {tree}; the model was traced with {self.tree}.")
        sizes: dict[str, int] = {}
        for leaf, value in zip(self.leaves, values, strict=True):
            leaf.check(value, sizes)
        return values, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSpec:
    """The structure of the model's result, which is built from the graph's outputs.

    `sources` has one entry a leaf: `("output", i)`, `("argument", i)` (returned unchanged),
    `("bound", tensor)` or `("constant", value)`.
    """

    sources: tuple[tuple[str, Any], ...]
    tree: pytree.TreeSpec

    def build(self, outputs: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """Build the model's result; tensors are passed through, not copied."""
        leaves = [
            outputs[what] if kind == "output" else arguments[what] if kind == "argument" else what
            for kind, what in self.sources
        ]
        return pytree.tree_unflatten(leaves, self.tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCall:
    """The example call of a module that is traced, with its leaves and their dynamic dims."""

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    paths: tuple[str, ...]  # of the leaves
    declared: Mapping[int, Mapping[int, str]]  # leaf -> {dim: size name}
    call_spec: CallSpec

    @classmethod
    def of(
        cls, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_dims: DynamicDims
    ) -> ExampleCall:
        """Take a call of `module` apart.

        Raises `InputMismatch` where the arguments do not fit `forward`, and `ConfigError` for wrong `dynamic_dims`.
        """
        signature = inspect.signature(module.forward)
        try:
            bound = bind_arguments(signature, args, kwargs)
        except TypeError as error:
            raise InputMismatch(f"the example inputs do not fit forward{signature}: {error}.") from None
        paths = leaf_paths(bound.arguments)
        declared = declared_dims(dynamic_dims, paths)
        check_examples(declared, paths)
        leaves, tree = pytree.tree_flatten(dict(bound.arguments))
        return cls(
            leaves=tuple(leaves),
            tree=tree,
            paths=tuple(path for path, _ in paths),
            declared=declared,
            call_spec=_call_spec(signature, leaves, tree, paths, declared),
        )


def _call_spec(
    signature: inspect.Signature,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    paths: Sequence[tuple[str, Any]],
    declared: Mapping[int, Mapping[int, str]],
) -> CallSpec:
    specs: list[TensorLeaf | ConstantLeaf] = []
    for index, leaf in enumerate(leaves):
        path = paths[index][0]
        if isinstance(leaf, torch.Tensor):
            dims = declared.get(index, {})
            shape = tuple(dims.get(dim, int(size)) for dim, size in enumerate(leaf.shape))
            strides = None if leaf.is_contiguous() else tuple(leaf.stride())
            specs.append(TensorLeaf(path=path, dtype=leaf.dtype, device=leaf.device, shape=shape, strides=strides))
        else:
            specs.append(ConstantLeaf(path=path, value=leaf))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    is_flat = all(p.kind in positional for p in parameters) and len(leaves) == len(parameters)
    is_flat = is_flat and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return CallSpec(signature=signature, leaves=tuple(specs), tree=tree, is_flat=is_flat)


@dataclass(frozen=True, slots=True)
class SizeInput:
    """A placeholder that is the size of `leaf`'s dim `dim`."""

    name: str
    leaf: int
    dim: int


@dataclass(frozen=True, slots=True)
class ArgumentInput:
    """A placeholder that is the caller's tensor `leaf`."""

    name: str
    leaf: int


@dataclass(frozen=True, slots=True)
class BoundInput:
    """A placeholder that is a tensor of the module, fixed when it was compiled."""

    name: str
    kind: str  # "parameter", "buffer", "constant", or "merged": several parameters stored as one tensor
    tensor: torch.Tensor
    members: tuple[str, ...] = ()  # for "merged": the names of the parameters, in order
    source: str = ""  # for "constant": the expression by which Dynamo found it

    @classmethod
    def of(cls, module: torch.nn.Module, kind: str, name: str) -> BoundInput:
        """Return the input for the parameter or buffer of that name. Raises `AttributeError` where there is none."""
        return cls(name, kind, module.get_buffer(name) if kind == "buffer" else module.get_parameter(name))


GraphInput = SizeInput | ArgumentInput | BoundInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """All that a call needs of a trace; the graph is not part of an interface."""

    call_spec: CallSpec
    result_spec: ResultSpec
    arguments: tuple[SizeInput | ArgumentInput, ...]  # of the stitched function, in order
    size_symbols: Mapping[str, str]  # symbol -> size name
    read_guards: Callable[[], GuardAudit]
