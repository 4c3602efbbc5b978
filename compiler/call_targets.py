"""What a step between pieces calls, as data: an op by its name, a function by the module it lies in, a method."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.compiler.piece_format import qualified_name, resolve_function

_MODULES = frozenset({"torch", "_operator", "operator", "math", "builtins"})
"""Where functions may lie that a plan names; nothing else is imported on an entry's word."""


class NotStorable(Exception):
    """Something that no entry of the cache can hold; the message says what."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of the method `name` of its first argument."""

    name: str

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.name)(*args, **kwargs)


def target_as_data(target: Any) -> dict[str, str]:
    """`target` as JSON. Raises `NotStorable`."""
    if isinstance(target, MethodCall):
        return {"method": target.name}
    if isinstance(target, torch._ops.OpOverload):
        return {"op": str(target._schema.name), "overload": str(target._overloadname)}
    if isinstance(target, torch._ops.OpOverloadPacket):
        return {"packet": str(target._qualified_op_name)}
    if callable(target) and hasattr(target, "__name__") and not isinstance(target, torch._ops.HigherOrderOperator):
        name = qualified_name(target)
        with contextlib.suppress(ImportError, AttributeError):
            if name.partition(".")[0] in _MODULES and resolve_function(name) is target:
                return {"function": name}
    raise NotStorable(f"it calls {target!r}, which is no registered op and no function of torch")


def target_of(data: dict[str, str]) -> Any:
    """What `target_as_data` wrote of. Raises `NotStorable` where this process has no such op."""
    match data:
        case {"method": name}:
            return MethodCall(name)
        case {"op": name, "overload": overload}:
            return getattr(_packet(name), overload)
        case {"packet": name}:
            return _packet(name)
        case {"function": name} if name.partition(".")[0] in _MODULES:
            return resolve_function(name)
    raise NotStorable(f"{data!r} is nothing that a step calls")


def schema_of(target: Any) -> str | None:
    """The schema of a registered op, overloads and all; None for a function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return "; ".join(str(getattr(target, name)._schema) for name in sorted(target.overloads()))
    return None


def _packet(name: str) -> Any:
    namespace, _, op = name.partition("::")
    try:
        return getattr(getattr(torch.ops, namespace), op)
    except AttributeError:
        raise NotStorable(f"op {name} is not registered in this process") from None
