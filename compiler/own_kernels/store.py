"""Our own kernels in the cache: one entry per model, with a blob for each time that kernels were added.

A model has dozens of kernels of 10 to 50 kB. As separate blobs, each would be written and synced, and opened and read,
by itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import time
from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

import torch

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.keys import key_of
from piecegraph.cache.store.store import NotSaved
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.compiler.keys.machine_factors import build_factors, machine_factors
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.triton.kernel_pack import KernelFiles, pack, unpack

KERNELS_FORMAT = 1
"""The version of the format of blobs and of fingerprints; part of every key."""

ROLE = "triton"

MOST_BLOBS = 8
"""The largest number of blobs of an entry before they are merged into one. Roles have one digit, and later blobs win.
"""

MOST_KERNELS = 1024
"""The largest number of kernels of an entry before those that this process has not used are dropped."""

_OF_KERNELS = ("compiler/triton/compat.py", "compiler/own_kernels/store.py", "compiler/triton/kernel_pack.py")


def graphs_key(keys: Iterable[str]) -> str:
    """Return the key under which kernels are saved without a plan, made from the keys of unique pieces."""
    return hashlib.sha256("\n".join(sorted(set(keys))).encode()).hexdigest()


def kernel_factors(of: str, device: torch.device) -> dict[str, Any]:
    """Return the key factors of the kernels of `of`, the key of a model's plan or `graphs_key`.

    They hold versions and the machine; the fingerprint of a kernel holds everything else that determines its binary.
    """
    return {
        "kind": "kernels",
        "format": KERNELS_FORMAT,
        "of": of,
        "build": {**build_factors(_OF_KERNELS), "triton_files": triton_files()},
        "machine": machine_factors(device),
    }


@functools.cache
def triton_files() -> str | None:
    """Return the sha256 of the digests of Triton's files as the installer recorded them; None if it did not.

    Hashing the files themselves, as Triton does for its own cache, reads half a gigabyte.
    """
    try:
        record = importlib.metadata.distribution("triton").read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    files = sorted(line for line in record.splitlines() if line.startswith("triton/") and "sha256=" in line)
    files = [line for line in files if ".pyc," not in line]
    return hashlib.sha256("\n".join(files).encode()).hexdigest() if files else None


class KernelStore:
    """The stored kernels of one model in one cache. No method raises for disk errors."""

    def __init__(self, cache: CompileCache, of: str, device: torch.device) -> None:
        self._cache = cache
        self._factors = kernel_factors(of, device)
        self.key = key_of(self._factors)
        self._blobs: dict[str, bytes] = {}  # of the entry, by role
        self._kept = KernelFiles()  # the kernels in `_blobs`
        self._seconds = 0.0  # of compiling `_kept`

    @property
    def is_only_read(self) -> bool:
        """True if nothing can be added, because the cache belongs to another user."""
        return self._cache.store is not None and self._cache.store.access is Access.READ_ONLY

    def load(self) -> KernelFiles:
        """Return the authenticated kernels of the entry; none if there is no usable entry."""
        loaded = self._cache.load(self.key)
        if loaded is None:
            return self._kept
        blobs = {role: data for role, data in sorted(loaded.blobs.items()) if role.startswith(f"{ROLE}/")}
        try:
            kept = functools.reduce(KernelFiles.__or__, map(unpack, blobs.values()), KernelFiles())
        except ValueError as error:
            self._cache.reject(self.key, f"reading its kernels: {error}")
            return self._kept
        self._blobs, self._kept = blobs, kept
        self._seconds = sum(loaded.entry.seconds.values())
        return kept

    def reject(self, fingerprint: str) -> None:
        """Forget a kernel that cannot be loaded, so that the next one with its fingerprint replaces it."""
        self._kept = self._kept.without(KernelFiles({fingerprint: {}}))

    def save(self, files: KernelFiles, used: Set[str], seconds: float) -> str:
        """Add the kernels that are not in the entry; return why that failed, or "".

        `used` holds the fingerprints of kernels that this process has used, `seconds` the time of compiling new ones.
        Of processes that save concurrently, the last one wins; later starts compile and add the kernels of the others.
        """
        new = files.without(self._kept)
        if not new:
            return ""
        kept, blobs = self._kept | new, {**self._blobs, f"{ROLE}/{len(self._blobs)}": pack(new)}
        if len(kept.kernels) > MOST_KERNELS:
            kept = KernelFiles({key: each for key, each in kept.kernels.items() if key in used}, kept.libraries)
            blobs = {f"{ROLE}/0": pack(kept)}
        elif len(blobs) > MOST_BLOBS:
            blobs = {f"{ROLE}/0": pack(kept)}
        entry = Entry.of(
            self._factors,
            blobs,
            created=time.time(),
            seconds={"compile": self._seconds + seconds},
            versions=self._cache.versions(),
            notes={"kernels": len(kept.kernels), "functions": _functions(kept)},
        )
        saved = self._cache.save(entry, blobs)
        if isinstance(saved, NotSaved):
            return saved.reason
        self._blobs, self._kept, self._seconds = blobs, kept, self._seconds + seconds
        return ""


def _functions(files: KernelFiles) -> dict[str, int]:
    """Return the number of kernels per function, for display. The files of a kernel are named after its function."""
    names = (name.removesuffix(".json") for named in files.kernels.values() for name in named if name.endswith(".json"))
    return dict(sorted(Counter(names).items()))
