"""Values as plain data, for `--json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def as_plain(value: Any) -> Any:
    """Return a value as plain data.

    Dataclasses and mappings become dicts, sequences lists; JSON's own types stay, anything else becomes text.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
