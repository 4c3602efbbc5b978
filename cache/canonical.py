"""JSON in the one form that is hashed and signed: sorted keys, no spaces, ASCII."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """`value` as bytes, the same for equal values. Raises ValueError for NaN and infinities, TypeError for what
    JSON has no word for."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def signed_message(what: str, data: bytes) -> bytes:
    """What is signed in place of `data`, which is a `what`: a signature of one kind of thing is none of another."""
    return f"piecegraph {what} 1\n".encode() + data


def parse_canonical(data: bytes) -> Any:
    """The value `canonical_json` made `data` of. Raises ValueError for anything else: since another spelling of
    the same value is refused too, no bit of a file can change unnoticed."""
    try:
        value = json.loads(data.decode("ascii"))
        again = canonical_json(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if again != data:
        raise ValueError("not in canonical form")
    return value
