"""Passes as plain data, the form in which they reach the processes that compile pieces; nothing is pickled."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from piecegraph.passes.matching.graph_pass import GraphPass
from piecegraph.passes.matching.identity import options_of


class NotData(Exception):
    """The error that a pass cannot be rebuilt in another process; the message gives the reason."""


def pass_as_data(graph_pass: GraphPass) -> dict[str, Any]:
    """Return a pass as the importable name of its class and its fields. Raises `NotData`."""
    kind = type(graph_pass)
    module, name = kind.__module__, kind.__qualname__
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not kind:
        raise NotData(f"{name} is not a class that another process can import")
    fields = {field: _encoded(value, f"{name}.{field}") for field, value in options_of(graph_pass).items()}
    return {"module": module, "class": name, "fields": fields, "uuid": graph_pass.uuid()}


def pass_from_data(data: dict[str, Any]) -> GraphPass:
    """Return the pass that `pass_as_data` wrote. Raises `NotData` if it cannot be imported here or is not the same."""
    try:
        kind = getattr(importlib.import_module(data["module"]), data["class"])
        made: GraphPass = kind(**{field: _decoded(value) for field, value in data["fields"].items()})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise NotData(f"{data['class']} cannot be made in another process: {reason}") from error
    if made.uuid() != data["uuid"]:
        raise NotData(f"{data['class']} is another in another process: its source changed, or it reads more than files")
    return made


def _encoded(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_encoded(item, where) for item in value]
    raise NotData(f"{where} is a {type(value).__name__}, which is not plain data")


def _decoded(value: Any) -> Any:
    """Return the value with lists as tuples: fields are hashable, so a list was a tuple."""
    return tuple(map(_decoded, value)) if isinstance(value, list) else value
