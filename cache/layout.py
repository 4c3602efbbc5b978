"""Where everything lies under a cache root, and the names that may appear there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_HEX64 = re.compile(r"[0-9a-f]{64}")


def is_digest(name: object) -> bool:
    """A sha256 in hexadecimal: all that keys and blobs are ever called, so that no name is a path."""
    return isinstance(name, str) and _HEX64.fullmatch(name) is not None


def default_key_file() -> Path:
    """The user's own key. It lies outside the cache: whoever copies a cache does not copy the right to sign."""
    from platformdirs import user_data_path

    return user_data_path("piecegraph", appauthor=False) / "cache.key"


@dataclass(frozen=True)
class Layout:
    """Paths under `root`; none need exist. Every path is relative to the root, so a copy of it works."""

    root: Path

    @cached_property
    def base(self) -> Path:
        return self.root / "v1"

    @cached_property
    def entries(self) -> Path:
        return self.base / "entries"

    @cached_property
    def blobs(self) -> Path:
        return self.base / "blobs"

    @property
    def quarantine(self) -> Path:
        return self.base / "quarantine"

    @property
    def locks(self) -> Path:
        return self.base / "locks"

    @property
    def temp(self) -> Path:
        """Files being written. Apart from entries and blobs, so that a listing meets none of them."""
        return self.base / "temp"

    @cached_property
    def used(self) -> Path:
        """An empty file a key, whose modification time says when the entry last helped."""
        return self.base / "used"

    @property
    def counters(self) -> Path:
        return self.base / "counters.log"

    @property
    def signed_list(self) -> Path:
        return self.base / "signed.json"

    @property
    def folders(self) -> tuple[Path, ...]:
        """All of them, parents first."""
        return (self.root, self.base, self.entries, self.blobs, self.quarantine, self.locks, self.temp, self.used)

    def entry(self, key: str) -> Path:
        assert is_digest(key), f"a key is a sha256 in hexadecimal, not {key!r}"
        return self.entries / f"{key}.json"

    def blob(self, digest: str) -> Path:
        assert is_digest(digest), f"a blob is named by its sha256 in hexadecimal, not {digest!r}"
        return self.blobs / digest

    def stamp(self, key: str) -> Path:
        assert is_digest(key), f"a key is a sha256 in hexadecimal, not {key!r}"
        return self.used / key

    def lock(self, key: str) -> Path:
        assert is_digest(key), f"a key is a sha256 in hexadecimal, not {key!r}"
        return self.locks / f"{key}.lock"
