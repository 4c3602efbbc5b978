"""Values of plans and keys as JSON, and back. A value without a JSON type becomes a mapping with one name."""

from __future__ import annotations

from typing import Any

import torch

from piecegraph.compiler.common.call_targets import NotStorable
from piecegraph.compiler.splitting.plan import Slot, TensorSpec


def as_data(value: Any) -> Any:
    """Return `value` as JSON data. Raises `NotStorable` for a value of an unknown type."""
    match value:
        case None | bool() | int() | str():
            if type(value) in (bool, int, str, type(None)):
                return value
        case bytes():
            return {"bytes": value.hex()}
        case float():
            return {"float": value.hex()}
        case Slot():
            return {"slot": value.name}
        case TensorSpec():
            return {"tensor": [list(value.shape), _name(value.dtype), str(value.device)]}
        case tuple() if type(value) is tuple or isinstance(value, torch.Size):
            return {"tuple": [as_data(item) for item in value]}
        case list():
            return [as_data(item) for item in value]
        case dict():
            return {"dict": [[as_data(key), as_data(item)] for key, item in value.items()]}
        case slice():
            return {"slice": [as_data(part) for part in (value.start, value.stop, value.step)]}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": _name(value)}
        case torch.device():
            return {"device": str(value)}
        case _ if value is Ellipsis:
            return {"ellipsis": True}
    raise NotStorable(f"{value!r} is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data")


def from_data(data: Any) -> Any:
    """Return the value that `as_data` wrote. Raises `NotStorable`, and what torch raises for unknown names."""
    if isinstance(data, list):
        return [from_data(item) for item in data]
    if not isinstance(data, dict):
        return data
    match data:
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"bytes": str(text)}:
            return bytes.fromhex(text)
        case {"slot": str(name)}:
            return Slot(name)
        case {"tensor": [shape, dtype, device]}:
            return TensorSpec(tuple(shape), dtype_of(dtype), torch.device(device))
        case {"tuple": items}:
            return tuple(from_data(item) for item in items)
        case {"dict": items}:
            return {from_data(key): from_data(item) for key, item in items}
        case {"slice": parts}:
            return slice(*(from_data(part) for part in parts))
        case {"torch": str(name)}:
            return _of_torch(name, (torch.dtype, torch.layout, torch.memory_format))
        case {"device": str(text)}:
            return torch.device(text)
        case {"ellipsis": True}:
            return ...
    raise NotStorable(f"{data!r} is not a value of a plan")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called `name`. Raises `NotStorable` for an unknown name."""
    found: torch.dtype = _of_torch(name, (torch.dtype,))
    return found


def _of_torch(name: str, kinds: tuple[type, ...]) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kinds):
        raise NotStorable(f"torch has no {name}")
    return found


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
