"""What a call of a compiled model must look like, checked cheaply, and how its result is put together."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.dynamic_dims import bind_arguments
from piecegraph.errors import InputMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLeaf:
    """A tensor argument: everything but the declared sizes is fixed."""

    path: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | str, ...]  # str: the name of a declared size
    strides: tuple[int, ...] | None  # None: contiguous

    def check(self, value: Any, sizes: dict[str, int]) -> None:
        """Raise `InputMismatch` unless `value` fits; declared sizes are added to `sizes`."""
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
        return "(" + ", ".join(map(str, self.shape)) + ("," if len(self.shape) == 1 else "") + ")"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLeaf:
    """An argument that is no tensor: its value is part of the trace."""

    path: str
    value: Any

    def check(self, value: Any, sizes: dict[str, int]) -> None:
        """Raise `InputMismatch` unless `value` is what was traced."""
        if value is not self.value and (type(value) is not type(self.value) or value != self.value):
            raise InputMismatch(
                f"{self.path} is {value!r}; the model was traced with {self.value!r}, and a value that is no tensor is "
                f"part of the trace. Compile once for each value of {self.path}, or pass it as a tensor."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """The arguments of one traced call."""

    signature: inspect.Signature
    leaves: tuple[TensorLeaf | ConstantLeaf, ...]
    tree: pytree.TreeSpec  # of the bound arguments
    is_flat: bool = field(default=False)  # every parameter is positional and a tensor: no tree to flatten

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, int]]:
        """The leaves of a call, in traced order, and its declared sizes by name.

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
    """How the model's result is built from the graph's outputs.

    `sources` has one entry a leaf: `("output", i)`, `("argument", i)` (returned as it came),
    `("bound", tensor)` or `("constant", value)`.
    """

    sources: tuple[tuple[str, Any], ...]
    tree: pytree.TreeSpec

    def build(self, outputs: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """The model's result; tensors are passed through, not copied."""
        leaves = [
            outputs[what] if kind == "output" else arguments[what] if kind == "argument" else what
            for kind, what in self.sources
        ]
        return pytree.tree_unflatten(leaves, self.tree)
