"""What a class is beyond its name: source tells nothing of what is made, or changed, while a program runs.

A class made by a function closes over that function's values; a method of a library's class may have been put in
another's place. Unlike what a module holds itself, what cannot be told here is left out: its class stands for it.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import torch
from torch import nn

from piecegraph.cache.keys import plain
from piecegraph.compiler.traced_globals import code_digest

_LIBRARIES = frozenset({"torch", "transformers", "piecegraph", *sys.stdlib_module_names})
"""Whose classes are as their source says, for which a version or a digest is in the key, but for what was changed."""


def class_facts(kind: type) -> dict[str, Any]:
    """Of `kind` and its bases: plain attributes, what containers of such hold, and functions by their code and what
    they close over. Of libraries' classes plain attributes, and functions that come from elsewhere."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base in (object, nn.Module):
            continue
        is_of_library = base.__module__.partition(".")[0] in _LIBRARIES
        for name, value in vars(base).items():
            function = _function_of(value)
            if function is not None:
                if not is_of_library or not _is_at_home(function, base, name):
                    found[name] = function_facts(function)
            elif not name.startswith("__") and (_is_plain(value) or not is_of_library):
                found[name] = plain(value) if _is_plain(value) else _told(value, ())
    return found


def function_facts(function: types.FunctionType, around: tuple[types.FunctionType, ...] = ()) -> list[Any]:
    """Code, what a closure holds, defaults and attributes. `around`: functions this one is part of."""
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
    return ["function", name, code_digest(function.__code__), *(_told(part, inside) for part in parts)]


def _told(value: Any, around: tuple[types.FunctionType, ...]) -> Any:
    """`value` as plain data, as far as it can be told."""
    match value:
        case _ if _is_plain(value):
            return plain(value)
        case list() | tuple():
            return [_told(item, around) for item in value]
        case set() | frozenset():
            return sorted((_told(item, around) for item in value), key=repr)
        case dict():
            return [[_told(key, around), _told(item, around)] for key, item in value.items()]
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
    return type(value) in (bool, int, float, str, bytes, type(None)) and value == value  # NaN cannot be told


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _function_of(value: Any) -> types.FunctionType | None:
    """The function in an attribute of a class, which may be a method of any kind, or a property."""
    for inner in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))):
        if isinstance(inner, types.FunctionType):
            return inner
    return None


def _is_at_home(function: types.FunctionType, owner: type, name: str) -> bool:
    """It was defined in the class, under that name."""
    return (function.__module__, function.__qualname__) == (owner.__module__, f"{owner.__qualname__}.{name}")
