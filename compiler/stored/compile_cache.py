"""The cache as one compile sees it: what was found, and why not. No trouble of a disk gets past it."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator, Mapping

import torch

from piecegraph import __version__
from piecegraph.cache.capacity import max_cache_bytes
from piecegraph.cache.collect import collect_if_over
from piecegraph.cache.entry import Entry
from piecegraph.cache.single_flight import Flight, single_flight
from piecegraph.cache.store import Loaded, NotSaved, Saved, Store
from piecegraph.cache.trust import Access
from piecegraph.compiler.stored.cache_choice import open_store, what_is_kept
from piecegraph.compiler.stored.machine_factors import version_of
from piecegraph.config import CompileConfig
from piecegraph.errors import CacheError

logger = logging.getLogger(__name__)


class CompileCache:
    """Made by `open`, or over a store of the caller's. `keeps` is what of it may be used; `reason` why that is not all
    of it. Without `reads` nothing is loaded: all is compiled anew, and takes the place of what was there."""

    def __init__(self, store: Store | None, keeps: bool | str, reason: str = "", *, reads: bool = True) -> None:
        self.store = store
        self.keeps = keeps
        self.reason = reason
        self._reads = reads
        self._max_bytes = max_cache_bytes()  # raises `ConfigError`
        self.misses: dict[str, str] = {}  # key -> why there was nothing to load

    @classmethod
    def open(cls, config: CompileConfig) -> CompileCache:
        """The cache that `config` and the environment choose. Raises `ConfigError` for a `PIECEGRAPH_CACHE` or a
        `PIECEGRAPH_CACHE_MAX_SIZE` that means nothing; a folder that is not to be trusted is a warning, and the compile
        goes on without a cache."""
        keeps, reason = what_is_kept(config)
        if keeps is False:
            return cls(None, False, reason)
        try:
            return cls(open_store(config), keeps, reason)
        except (CacheError, OSError) as error:
            logger.warning("nothing is loaded from the cache or kept in it: %s", error)
            return cls(None, False, str(error))

    @property
    def keeps_plans(self) -> bool:
        """Whether a trace may be taken from it."""
        return self.store is not None and self.keeps is True

    def has(self, key: str) -> bool:
        """There is something under `key` that `load` would look at."""
        return self.store is not None and self._reads and self.store.exists(key)

    def load(self, key: str) -> Loaded | None:
        """What is under `key`, authenticated; None, and a reason in `misses`, where there is nothing to be used."""
        if self.store is None:
            return None
        if not self._reads:
            self.misses[key] = "nothing was to be loaded"
            return None
        found = self.store.load(key)
        if isinstance(found, Loaded):
            self.misses.pop(key, None)
            return found
        self.misses[key] = found.reason.value + (f": {found.detail}" if found.detail else "")
        return None

    def reject(self, key: str, why: str) -> None:
        """What `load` gave cannot be used after all."""
        logger.warning("cache entry %s is not used (%s); compiling again", key, why)
        self.misses[key] = why

    def keep_to_size(self) -> None:
        """Remove what was longest unused, where there is more than a cache may hold. For when something was added."""
        if self.store is None or self.store.access is Access.READ_ONLY:
            return
        try:
            done = collect_if_over(self.store.layout, now=self.store.clock(), max_bytes=self._max_bytes)
        except OSError as error:
            logger.warning("the cache is not kept to its size: %s", error)
            return
        if done is not None and done.entries:
            logger.info(
                "removed %d entries of the cache that were longest unused, %.2f GiB; %.2f GiB stay",
                len(done.entries),
                done.freed_bytes / 2**30,
                done.kept_bytes / 2**30,
            )

    def save(self, entry: Entry, blobs: Mapping[str, bytes]) -> Saved | NotSaved:
        """Keep it, or say why not."""
        return self.store.save(entry, blobs) if self.store is not None else NotSaved(self.reason)

    @contextlib.contextmanager
    def flight(self, key: str) -> Iterator[Flight]:
        """While the body compiles what is under `key`, other processes wait for it."""
        if self.store is None or not self.store.prepare():
            yield Flight(False, 0.0, "no cache to share")
            return
        with single_flight(self.store.layout, key) as flight:
            yield flight

    @staticmethod
    def versions() -> dict[str, str]:
        """For people who read an entry."""
        found = {
            "piecegraph": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "triton": version_of("triton"),
            "transformers": version_of("transformers"),
        }
        return {name: version for name, version in found.items() if version is not None}
