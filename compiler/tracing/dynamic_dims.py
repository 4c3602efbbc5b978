"""The dims of arguments that vary, as the caller declares them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piecegraph.errors import ConfigError, did_you_mean

DEFAULT_SIZE_NAME = "num_tokens"
"""The size name of a dim that is declared without a name."""

DynamicDims = Mapping[str, int | Mapping[int, str]]
"""A map from argument path to `{dim: size name}`; an int alone is a dim named `"num_tokens"`."""


def bind_arguments(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind `args` and `kwargs` to parameter names and fill in defaults. Raises `TypeError` as a call would."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def leaf_paths(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return every leaf of the bound arguments with its path: `input_ids`, `xs[0]`, `batch['ids']`, `out.logits`."""
    paths = []
    for name, value in arguments.items():
        for key_path, leaf in pytree.tree_flatten_with_path(value)[0]:
            paths.append((name + pytree.keystr(key_path), leaf))
    return paths


def declared_dims(dynamic_dims: DynamicDims, paths: Sequence[tuple[str, Any]]) -> dict[int, dict[int, str]]:
    """Return leaf index -> {dim: size name}, checked against the example arguments.

    Raises `ConfigError` for an argument that does not exist, is not a tensor, or has no such dim.
    """
    index_of = {path: index for index, (path, _) in enumerate(paths)}
    declared: dict[int, dict[int, str]] = {}
    for path, dims in dynamic_dims.items():
        index = index_of.get(path.replace('"', "'"))
        if index is None:
            raise ConfigError(f"dynamic_dims names {path!r}, which is not an argument.{did_you_mean(path, index_of)}")
        leaf = paths[index][1]
        if not isinstance(leaf, torch.Tensor):
            raise ConfigError(f"dynamic_dims names {path!r}, which is {type(leaf).__name__}, not a tensor.")
        named = {dims: DEFAULT_SIZE_NAME} if isinstance(dims, int) else dict(dims)
        for dim, name in named.items():
            if not isinstance(dim, int) or not -leaf.ndim <= dim < leaf.ndim:
                raise ConfigError(f"dynamic_dims[{path!r}] has dim {dim!r}, but the tensor has {leaf.ndim} dims.")
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(
                    f"dynamic_dims[{path!r}][{dim}] is {name!r}; a size name is an identifier, e.g. 'num_tokens'."
                )
            declared.setdefault(index, {})[dim % leaf.ndim] = name
    return declared


def check_examples(declared: Mapping[int, Mapping[int, str]], paths: Sequence[tuple[str, Any]]) -> None:
    """Raise `ConfigError` where dims of one size name differ in the examples."""
    seen: dict[str, tuple[str, int]] = {}
    for index, dims in declared.items():
        path, tensor = paths[index]
        for dim, name in dims.items():
            size = int(tensor.shape[dim])
            other, other_size = seen.setdefault(name, (f"{path}.shape[{dim}]", size))
            if size != other_size:
                raise ConfigError(
                    f"size {name!r} is {size} in {path}.shape[{dim}] but {other_size} in {other}; "
                    "equal names mean equal sizes, so give differing dims different names."
                )
