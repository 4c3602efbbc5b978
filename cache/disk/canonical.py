"""Canonical JSON, the one form that is hashed and signed: sorted keys, no spaces, ASCII."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Return `value` as canonical JSON, the same bytes for equal values.

    Raises ValueError for NaN and infinities, TypeError for values that JSON cannot express.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def signed_message(what: str, data: bytes) -> bytes:
    """Return the message that is signed in place of `data`.

    `what` names the kind of `data`, so that a signature of one kind is invalid for another.
    """
    return f"piecegraph {what} 1\n".encode() + data


def parse_canonical(data: bytes) -> Any:
    """Return the value from which `canonical_json` made `data`.

    Raises ValueError for anything else. Another spelling of the same value is refused too, so no bit of a file can
    change unnoticed.
    """
    try:
        value = json.loads(data.decode("ascii"))
        again = canonical_json(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if again != data:
        raise ValueError("not in canonical form")
    return value
