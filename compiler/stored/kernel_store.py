"""Kernels of our own in the cache: one entry a model, with a blob for each time that some were added.

Dozens of kernels come with a model, of 10 to 50 kB each: as blobs of their own, each would be written and synced, and
read and opened, by itself.
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

from piecegraph.cache.entry import Entry
from piecegraph.cache.keys import key_of
from piecegraph.cache.store import NotSaved
from piecegraph.cache.trust import Access
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.kernel_pack import KernelFiles, pack, unpack
from piecegraph.compiler.stored.machine_factors import build_factors, machine_factors

KERNELS_FORMAT = 1
"""Of blobs, and of fingerprints; part of every key."""

ROLE = "triton"

MOST_BLOBS = 8
"""Of an entry; then they are made one. In order of their roles, which have one digit, later ones count."""

MOST_KERNELS = 1024
"""Of an entry. Past that, those that this process has not used go."""

_OF_KERNELS = ("compiler/triton_compat.py", "compiler/stored/kernel_*.py")


def graphs_key(keys: Iterable[str]) -> str:
    """What kernels are kept for where there is no plan: the graphs, by the canonical keys of unique pieces."""
    return hashlib.sha256("\n".join(sorted(set(keys))).encode()).hexdigest()


def kernel_factors(of: str, device: torch.device) -> dict[str, Any]:
    """`of`: the key of the model's plan, or `graphs_key`. What decides each binary is in its fingerprint; versions and
    the machine are here."""
    return {
        "kind": "kernels",
        "format": KERNELS_FORMAT,
        "of": of,
        "build": {**build_factors(_OF_KERNELS), "triton_files": triton_files()},
        "machine": machine_factors(device),
    }


@functools.cache
def triton_files() -> str | None:
    """sha256 over the digests of Triton's files, as its installer has recorded them; None: it has not.

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
    """The kernels of one model, over one cache. Nothing here raises for what a disk says."""

    def __init__(self, cache: CompileCache, of: str, device: torch.device) -> None:
        self._cache = cache
        self._factors = kernel_factors(of, device)
        self.key = key_of(self._factors)
        self._blobs: dict[str, bytes] = {}  # those of the entry, by role
        self._kept = KernelFiles()  # what is in them
        self._seconds = 0.0  # that compiling them took

    @property
    def is_only_read(self) -> bool:
        """Nothing can be added: the cache is another user's."""
        return self._cache.store is not None and self._cache.store.access is Access.READ_ONLY

    def load(self) -> KernelFiles:
        """What the entry has, authenticated; nothing where there is none, or none that can be used."""
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
        """A kernel that cannot be loaded: the next one of the same fingerprint takes its place."""
        self._kept = self._kept.without(KernelFiles({fingerprint: {}}))

    def save(self, files: KernelFiles, used: Set[str], seconds: float) -> str:
        """Add what is not kept yet; why not, or nothing.

        `used`: fingerprints of kernels that this process has used. `seconds`: what compiling those that are new took.
        Of processes that add at once, one's stay: what the others added, a later start compiles and adds.
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
    """How many kernels each function has, which is the name of their files. For people."""
    names = (name.removesuffix(".json") for named in files.kernels.values() for name in named if name.endswith(".json"))
    return dict(sorted(Counter(names).items()))
