"""The group files of Triton's cache, which list the files of a kernel.

Triton writes a group file, `__grp__<kernel>.json`, beside each kernel, with the absolute path of each file. It does not
find a kernel whose files were moved, and compiles it again. Stored group files therefore hold file names only.

Source: `triton.runtime.cache.FileCacheManager.put_group` and `get_group`.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePath

PREFIX = "__grp__"


def with_relative_paths(name: str, data: bytes) -> bytes:
    """Return the file `name` with file names for paths if it is a group file; return other files unchanged."""
    return _with_paths(name, data, None)


def with_absolute_paths(name: str, data: bytes, folder: Path) -> bytes:
    """Return the file `name` with paths in `folder` if it is a group file; return other files unchanged."""
    return _with_paths(name, data, folder)


def _with_paths(name: str, data: bytes, folder: Path | None) -> bytes:
    if not PurePath(name).name.startswith(PREFIX):
        return data
    try:
        content = json.loads(data)
        paths = {key: PurePath(path).name for key, path in content["child_paths"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return data  # not a group file as we know it: Triton reads it, or compiles
    if folder is not None:
        paths = {key: str(folder / path) for key, path in paths.items()}
    return json.dumps({**content, "child_paths": paths}).encode()
