"""Which model families the fast suite goes through one by one; the slow suite has them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow
QUICK = ("llama", "gemma3", "gpt-neox", "qwen3-moe", "gpt-oss")
"""One of each make: plain, norms of heads with four norms and two kinds of layers, layer norms and partial rotary
embeddings beside each other, routed experts, and experts with biases and sinks."""


def families(names: Iterable[str], *values: Any) -> list[Any]:
    """Return `names` as parameters of a test, each with `values` after it; those that are not quick are slow."""
    return [
        pytest.param(name, *values, id="-".join([name, *map(str, values)]), marks=() if name in QUICK else SLOW)
        for name in names
    ]
