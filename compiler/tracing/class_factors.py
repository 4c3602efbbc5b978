"""Facts about a class beyond its name, for keys: its source does not show what a program makes or changes at run time.

A class made by a function closes over that function's values, and a method of a library's class may have been
replaced. Unlike an attribute of a module, a value that cannot be described here is not an error: its class stands for
it.
"""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import enum
import numbers
import os
import types
from typing import Any

import torch
from torch import nn

from piecegraph.cache.store.keys import plain
from piecegraph.compiler.tracing.code_reads import registered_classes
from piecegraph.compiler.tracing.read_facts import class_name, code_digest, is_library_module

_STANDARD_ABCS = tuple(
    each
    for each in (
        *(getattr(collections.abc, name) for name in sorted(collections.abc.__all__)),
        *(numbers.Number, numbers.Complex, numbers.Real, numbers.Rational, numbers.Integral),
        *(contextlib.AbstractContextManager, contextlib.AbstractAsyncContextManager, os.PathLike),
    )
    if isinstance(each, abc.ABCMeta)
)

_REMEMBERED_BY_LIBRARIES = frozenset({"_can_set_attn_implementation_cached_value"})
"""Attributes in which a library's class keeps what it found out about itself. transformers reads the class's source
for this one, when a model's attention is first changed; it would void the keys of plans made before."""


def class_facts(kind: type) -> dict[str, Any]:
    """Return facts about `kind` and its bases, by attribute.

    They cover plain attributes, containers of these, and functions by their code and what they close over. For
    classes of libraries they cover plain attributes, and functions that were defined elsewhere.
    """
    found: dict[str, Any] = {"bases": [class_name(base) for base in kind.__mro__[1:] if base is not object]}
    if not is_library_module(kind.__module__):
        if isinstance(kind, abc.ABCMeta) and (registered := registered_classes(kind)):
            found["registered"] = registered
        if counted := _standard_abcs(kind):
            found["counts as"] = counted
    for base in reversed(kind.__mro__):
        if base in (object, nn.Module):
            continue
        is_known = is_library_module(base.__module__)
        for name, value in vars(base).items():
            function = _function_of(value)
            if is_known and name in _REMEMBERED_BY_LIBRARIES:
                continue
            if function is not None:
                if not is_known or not _is_defined_in(base, function, name):
                    found[name] = function_facts(function)
            elif not name.startswith("__") and (_is_plain(value) or not is_known):
                found[name] = plain(value) if _is_plain(value) else _describe(value, ())
    return found


def _standard_abcs(kind: type) -> list[str]:
    """Return the names of the standard library's abstract classes that `kind` counts as a subclass of without being
    derived from them: it was registered, or has their methods."""
    return [class_name(each) for each in _STANDARD_ABCS if each not in kind.__mro__ and issubclass(kind, each)]


def patched_methods() -> dict[str, Any]:
    """Return the attributes of `torch.Tensor` and `nn.Module` that are not torch's own, and the hooks of all modules.

    A trace calls these methods with no guard on them, because nobody is supposed to replace them. Methods that a
    library adds or replaces, as transformers adds one while it makes a model, count by the library's version.
    """
    found: dict[str, Any] = {}
    for kind in (*torch.Tensor.__bases__, torch.Tensor, nn.Parameter, nn.Module):
        for name, value in vars(kind).items():
            function = _function_of(value)
            if function is not None and not is_library_module(function.__module__ or ""):
                found[f"{kind.__name__}.{name}"] = function_facts(function)
            elif callable(value) and not name.startswith("_") and getattr(value, "__name__", name) != name:
                found[f"{kind.__name__}.{name}"] = f"{getattr(value, '__module__', None)}.{value.__name__}"
            elif not name.startswith("_") and _is_plain(value):
                found[f"{kind.__name__}.{name}"] = plain(value)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        if hooks := getattr(nn.modules.module, name):
            found[name] = [_global_hook(hook) for hook in hooks.values()]
    return found


def _global_hook(hook: Any) -> Any:
    kind = f"a {class_name(type(hook))}"
    return function_facts(hook) if isinstance(hook, types.FunctionType) else kind


def function_facts(function: types.FunctionType, around: tuple[types.FunctionType, ...] = ()) -> list[Any]:
    """Return facts about a function: code, closure, defaults and attributes. `around`: functions that hold this one."""
    name = f"{function.__module__}.{function.__qualname__}"
    if function in around:
        return ["function around this", around.index(function)]
    inside = (*around, function)
    attributes = {key: value for key, value in vars(function).items() if not key.startswith("__")}
    parts = (
        [_in_cell(cell) for cell in function.__closure__ or ()],
        function.__defaults__,
        function.__kwdefaults__,
        attributes,
    )
    return ["function", name, code_digest(function.__code__), *(_describe(part, inside) for part in parts)]


def _describe(value: Any, around: tuple[types.FunctionType, ...]) -> Any:
    """Return `value` as plain data, and a value of any other kind as the name of its class."""
    match value:
        case _ if _is_plain(value):
            return plain(value)
        case list() | tuple():
            return [_describe(item, around) for item in value]
        case set() | frozenset():
            return sorted((_describe(item, around) for item in value), key=repr)
        case dict():
            return [[_describe(key, around), _describe(item, around)] for key, item in value.items()]
        case types.FunctionType():
            return function_facts(value, around)
        case type():
            return f"class {value.__module__}.{value.__qualname__}"
        case types.ModuleType():
            return f"module {value.__name__}"
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return str(value)
        case enum.Enum():
            return plain(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, bytes, type(None)) and value == value  # NaN cannot be compared


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _function_of(value: Any) -> types.FunctionType | None:
    """Return the function in an attribute of a class, which may be a method of any kind or a property."""
    for inner in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))):
        if isinstance(inner, types.FunctionType):
            return inner
    return None


def _is_defined_in(owner: type, function: types.FunctionType, name: str) -> bool:
    """Return whether `function` was defined in the class `owner` under that name."""
    return (function.__module__, function.__qualname__) == (owner.__module__, f"{owner.__qualname__}.{name}")
