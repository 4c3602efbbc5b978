"""The layout of a cache root: the paths and names that may appear there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_HEX64 = re.compile(r"[0-9a-f]{64}")


def is_digest(name: object) -> bool:
    """Return whether `name` is a sha256 in hexadecimal. Keys and blobs have no other names, so no name is a path."""
    return isinstance(name, str) and _HEX64.fullmatch(name) is not None


def default_key_file() -> Path:
    """Return the path of the user's own key.

    The path is outside the cache, so that a copy of a cache does not give the right to sign.
    """
    from platformdirs import user_data_path

    return user_data_path("piecegraph", appauthor=False) / "cache.key"


@dataclass(frozen=True)
class Layout:
    """The paths under `root`, none of which need exist. All are relative to the root, so a copy of the cache works."""

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
        """The folder of files that are being written, apart from entries and blobs, so listings do not see them."""
        return self.base / "temp"

    @cached_property
    def used(self) -> Path:
        """The folder of empty files, one for each key, whose modification time is when the entry was last used."""
        return self.base / "used"

    @property
    def counters(self) -> Path:
        return self.base / "counters.log"

    @property
    def signed_list(self) -> Path:
        return self.base / "signed.json"

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders of the cache, parents first."""
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
