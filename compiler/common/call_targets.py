"""The targets of calls between pieces, as data: an op by name, a function by its module and name, or a method."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.passes.ops.op_types import HigherOrderOperator, OpOverload, OpOverloadPacket

_MODULES = frozenset({"torch", "_operator", "operator", "math", "builtins"})
"""The packages whose functions a plan may name; a cache entry cannot cause any other import."""


class NotStorable(Exception):
    """An error for something that no entry of the cache can hold. The message names it."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of the method `name` of its first argument."""

    name: str

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.name)(*args, **kwargs)


def target_as_data(target: Any) -> dict[str, str]:
    """Return `target` as plain data for JSON. Raises `NotStorable` for an unknown kind of target."""
    if isinstance(target, MethodCall):
        return {"method": target.name}
    if isinstance(target, OpOverload):
        return {"op": str(target._schema.name), "overload": str(target._overloadname)}
    if isinstance(target, OpOverloadPacket):
        return {"packet": str(target._qualified_op_name)}
    if callable(target) and hasattr(target, "__name__") and not isinstance(target, HigherOrderOperator):
        name = qualified_name(target)
        with contextlib.suppress(ImportError, AttributeError):
            if name.partition(".")[0] in _MODULES and resolve_function(name) is target:
                return {"function": name}
    raise NotStorable(f"it calls {target!r}, which is neither a registered op nor a function of torch")


def target_from_data(data: dict[str, str]) -> Any:
    """Return the target that `target_as_data` wrote. Raises `NotStorable` where this process has no such op."""
    match data:
        case {"method": name}:
            return MethodCall(name)
        case {"op": name, "overload": overload}:
            return getattr(_packet(name), overload)
        case {"packet": name}:
            return _packet(name)
        case {"function": name} if name.partition(".")[0] in _MODULES:
            return resolve_function(name)
    raise NotStorable(f"{data!r} does not describe a target that a step can call")


def schema_of(target: Any) -> str | None:
    """Return the schema of a registered op, with the schemas of all overloads of a packet; None for a function."""
    if isinstance(target, OpOverload):
        return str(target._schema)
    if isinstance(target, OpOverloadPacket):
        return "; ".join(str(getattr(target, name)._schema) for name in sorted(target.overloads()))
    return None


def _packet(name: str) -> Any:
    namespace, _, op = name.partition("::")
    try:
        return getattr(getattr(torch.ops, namespace), op)
    except AttributeError:
        raise NotStorable(f"op {name} is not registered in this process") from None


def qualified_name(function: Any) -> str:
    """Return the dotted name that FX writes for a function; it can be imported where the function can be at all."""
    from torch.fx.node import _get_qualified_name

    if isinstance(function, OpOverloadPacket):
        return f"torch.ops.{str(function._qualified_op_name).replace('::', '.')}"
    return _get_qualified_name(function)


def resolve_function(name: str) -> Any:
    """Return the function that a qualified name means. Raises `ImportError` or `AttributeError`."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for position, part in enumerate(parts[1:], start=1):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[: position + 1]))
        found = getattr(found, part)
    return found
