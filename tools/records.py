"""Values as plain data, for `--json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def as_plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, sequences as lists, what JSON knows as it is, anything else as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
