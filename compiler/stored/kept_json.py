"""A few facts that one start found out and others take from the cache: one JSON value under one key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from piecegraph.cache.entry import Entry
from piecegraph.cache.keys import key_of
from piecegraph.compiler.stored.compile_cache import CompileCache

Value = TypeVar("Value")


class KeptJson:
    """The value that one cache has, or will have, for some factors. Nothing here raises for what a disk says."""

    def __init__(self, cache: CompileCache, factors: Mapping[str, Any], role: str) -> None:
        """`factors`: plain (`cache.keys.plain`); `role`: of the blob."""
        self._cache = cache
        self._factors = factors
        self._role = role
        self.key = key_of(factors)

    def load(self, read: Callable[[Any], Value]) -> Value | None:
        """What `read` makes of the value; None where nothing is kept, or nothing that can be used. `read` raises
        ValueError, KeyError or TypeError for a value that makes no sense."""
        loaded = self._cache.load(self.key) if self._cache.has(self.key) else None
        if loaded is None:
            return None
        try:
            return read(json.loads(loaded.blobs[self._role]))
        except (ValueError, KeyError, TypeError) as error:
            self._cache.reject(self.key, f"reading its bytes: {error!r}")
            return None

    def save(self, value: Any, *, seconds: Mapping[str, float], notes: Mapping[str, Any]) -> None:
        """Keep it, where that goes, in place of what was there. `seconds`: what finding it out took."""
        blobs = {self._role: json.dumps(value).encode()}
        entry = Entry.of(
            self._factors, blobs, created=time.time(), seconds=seconds, versions=self._cache.versions(), notes=notes
        )
        self._cache.save(entry, blobs)
