"""Lists of Triton's cache that say which files a kernel is made of.

Triton writes one beside each kernel it compiles, `__grp__<kernel>.json`, with the whole path of each file. A kernel
whose files were moved is not found by it, and compiled again. So lists travel with the files' names alone.

Source: `triton.runtime.cache.FileCacheManager.put_group` and `get_group`.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePath

PREFIX = "__grp__"


def without_folder(name: str, data: bytes) -> bytes:
    """The file `name` of a kernel's folder as it travels: a list of files with their names for paths, any other as
    it is."""
    return _with_paths(name, data, None)


def in_folder(name: str, data: bytes, folder: Path) -> bytes:
    """The same as it is read in `folder`, the kernel's."""
    return _with_paths(name, data, folder)


def _with_paths(name: str, data: bytes, folder: Path | None) -> bytes:
    if not PurePath(name).name.startswith(PREFIX):
        return data
    try:
        content = json.loads(data)
        paths = {key: PurePath(path).name for key, path in content["child_paths"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return data  # no list that we know: Triton reads it, or compiles
    if folder is not None:
        paths = {key: str(folder / path) for key, path in paths.items()}
    return json.dumps({**content, "child_paths": paths}).encode()
