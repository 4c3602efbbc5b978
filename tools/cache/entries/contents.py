"""The blobs of an entry, and of the pieces a plan is made of, as files with readable names.

Only authenticated bytes get here, and they are never run. Still, no file name is taken from them unchanged: a role
becomes a path below a folder, whatever its text.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from piecegraph.cache.store.store import Loaded, Miss, Store
from piecegraph.compiler.triton.kernel_pack import unpack
from piecegraph.errors import CacheError
from piecegraph.tools.cache.entries.entry_view import KERNELS, view
from piecegraph.tools.cache.entries.key_prefix import SHOWN
from piecegraph.tools.cache.entries.plan_pieces import plan_pieces


class Kind(enum.Enum):
    GRAPH = "graph"
    CODE = "code"
    DATA = "data"


_FILES = {
    "source": ("stitched.py", Kind.CODE),
    "code": ("code.py", Kind.CODE),
    "graph": ("graph.txt", Kind.GRAPH),
    "graph.json": ("graph.json", Kind.DATA),
    "plan": ("plan.json", Kind.DATA),
    "guards": ("guards.json", Kind.DATA),
    "piece": ("piece.json", Kind.DATA),
}
"""Role -> file name and kind of content (docs/cache_format.md). Other roles keep their names, and are data."""

NOT_FOR_PEOPLE = "artifact"
"""The role of blobs that torch unpickles."""


@dataclass(frozen=True, slots=True)
class ContentFile:
    """A blob under the name it is shown and dumped as."""

    path: str  # relative, of safe parts
    kind: Kind
    data: bytes

    @property
    def text(self) -> str | None:
        """The blob as text, with JSON laid out; None if it is not text."""
        if b"\0" in self.data:
            return None
        try:
            text = self.data.decode("utf-8")
            return json.dumps(json.loads(text), indent=1) + "\n" if self.path.endswith(".json") else text
        except (ValueError, RecursionError):
            return None


def load(store: Store, key: str) -> Loaded:
    """Return the entry and all its bytes, authenticated. Raises `CacheError` if they cannot be authenticated."""
    found = store.verify(key)
    if isinstance(found, Miss):
        detail = f" ({found.detail})" if found.detail else ""
        raise CacheError(f"entry {key[:SHOWN]} cannot be looked into: it is {found.reason.value}{detail}.")
    return found


def content_files(store: Store, loaded: Loaded) -> tuple[ContentFile, ...]:
    """Return the files of the entry, then those of each piece of a plan in a folder of its own.

    For kernels these are the files that their blobs are made of. Raises `CacheError` for a piece that cannot be
    loaded.
    """
    if view(loaded.entry).kind == KERNELS:
        return tuple(_kernel_files(loaded.blobs))
    files = _files(loaded.blobs, "")
    for piece in plan_pieces(loaded):
        files += _files(load(store, piece.key).blobs, f"{piece.name}/")
    return tuple(files)


def _files(blobs: Mapping[str, bytes], folder: str) -> list[ContentFile]:
    named = {role: _FILES.get(role, (safe_path(role), Kind.DATA)) for role in sorted(blobs) if role != NOT_FOR_PEOPLE}
    return [ContentFile(folder + path, kind, blobs[role]) for role, (path, kind) in named.items()]


def _kernel_files(blobs: Mapping[str, bytes]) -> list[ContentFile]:
    """Return each kernel's files in a folder named by the first digits of its fingerprint.

    A blob of another version is returned as it is.
    """
    found = {}
    for role, data in sorted(blobs.items()):
        try:
            files = unpack(data)
        except ValueError:
            found[safe_path(role)] = data
            continue
        for fingerprint, named in files.kernels.items():
            found |= {safe_path(f"kernel/{fingerprint[:SHOWN]}/{name}"): each for name, each in named.items()}
        found |= {safe_path(f"library/{path}"): each for path, each in files.libraries.items()}
    return [ContentFile(path, Kind.DATA, data) for path, data in found.items()]


def safe_path(role: str) -> str:
    """Return `role` as a relative path that stays below the folder it is put in."""
    parts = [re.sub(r"[^A-Za-z0-9._-]", "_", part).lstrip(".") for part in role.split("/")]
    return "/".join(part[:100] for part in parts if part) or "_"
