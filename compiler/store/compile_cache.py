"""The cache as one compile sees it. Errors of the disk become reasons and warnings, and are never raised."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator, Mapping

import torch

from piecegraph import __version__
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.single_flight import Flight, Flights, OnWait, Patience, single_flight
from piecegraph.cache.store.store import Loaded, NotSaved, Saved, Store
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.cache.upkeep.capacity import max_cache_bytes
from piecegraph.cache.upkeep.collect import collect_if_over
from piecegraph.compiler.keys.machine_factors import version_of
from piecegraph.compiler.store.cache_choice import open_store, resolve_cache_mode
from piecegraph.config import CompileConfig
from piecegraph.errors import CacheError

logger = logging.getLogger(__name__)


class CompileCache:
    """A cache for one compile, made by `open` or over the caller's store.

    `mode` is a value of `CompileConfig.cache`, and `reason` says why not everything is kept. Without `reads` nothing is
    loaded: everything is compiled again and replaces the existing entries.
    """

    def __init__(self, store: Store | None, mode: bool | str, reason: str = "", *, reads: bool = True) -> None:
        self.store = store
        self.mode = mode
        self.reason = reason
        self._reads = reads
        self._max_bytes = max_cache_bytes()  # raises `ConfigError`
        self.misses: dict[str, str] = {}  # key -> why there was nothing to load
        self.patience: Patience | None = None  # how long other processes are waited for; None: the default

    @classmethod
    def open(cls, config: CompileConfig) -> CompileCache:
        """Return the cache that `config` and the environment choose.

        Raises `ConfigError` for an invalid `PIECEGRAPH_CACHE` or `PIECEGRAPH_CACHE_MAX_SIZE`. A folder that cannot be
        trusted is logged as a warning, and the compile continues without a cache.
        """
        mode, reason = resolve_cache_mode(config)
        if mode is False:
            return cls(None, False, reason)
        try:
            return cls(open_store(config), mode, reason)
        except (CacheError, OSError) as error:
            logger.warning("nothing is loaded from the cache or kept in it: %s", error)
            return cls(None, False, str(error))

    @property
    def stores_plans(self) -> bool:
        """Return whether plans may be loaded and stored, which replaces tracing."""
        return self.store is not None and self.mode is True

    def has(self, key: str) -> bool:
        """Return whether there is an entry under `key` that `load` would read."""
        return self.store is not None and self._reads and self.store.exists(key)

    def load(self, key: str) -> Loaded | None:
        """Return the authenticated entry of `key`; None, with a reason in `misses`, if there is no usable one."""
        if self.store is None:
            return None
        if not self._reads:
            self.misses[key] = "loading is turned off"
            return None
        found = self.store.load(key)
        if isinstance(found, Loaded):
            self.misses.pop(key, None)
            return found
        self.misses[key] = found.reason.value + (f": {found.detail}" if found.detail else "")
        return None

    def reject(self, key: str, why: str) -> None:
        """Record and log that the loaded entry of `key` cannot be used, with the reason `why`."""
        logger.warning("cache entry %s is not used (%s); compiling again", key, why)
        self.misses[key] = why

    def enforce_max_size(self) -> None:
        """Remove the least recently used entries if the cache is over its size limit. Call it after adding entries."""
        if self.store is None or self.store.access is Access.READ_ONLY:
            return
        try:
            done = collect_if_over(self.store.layout, now=self.store.clock(), max_bytes=self._max_bytes)
        except OSError as error:
            logger.warning("the size limit of the cache is not enforced: %s", error)
            return
        if done is not None and done.entries:
            logger.info(
                "removed the %d least recently used entries of the cache, %.2f GiB; %.2f GiB stay",
                len(done.entries),
                done.freed_bytes / 2**30,
                done.kept_bytes / 2**30,
            )

    def save(self, entry: Entry, blobs: Mapping[str, bytes]) -> Saved | NotSaved:
        """Save an entry, or return why it cannot be saved."""
        return self.store.save(entry, blobs) if self.store is not None else NotSaved(self.reason)

    @contextlib.contextmanager
    def flight(self, key: str, on_wait: OnWait | None = None) -> Iterator[Flight]:
        """Make other processes wait for `key` while the body compiles it.

        `on_wait` is called with the holder during a long wait; without it, a warning is logged.
        """
        if self.store is None or not self.store.prepare():
            yield Flight(False, 0.0, "no cache to share")
            return
        with single_flight(self.store.layout, key, self.patience, on_wait) as flight:
            yield flight

    def flights(self, on_wait: OnWait | None = None) -> Flights | None:
        """Return claims for several keys, none of which is held yet; None if there is no shared cache."""
        if self.store is None or not self._reads or not self.store.prepare():
            return None
        return Flights(self.store.layout, self.patience, on_wait)

    @staticmethod
    def versions() -> dict[str, str]:
        """Return the versions that an entry shows to its readers."""
        found = {
            "piecegraph": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "triton": version_of("triton"),
            "transformers": version_of("transformers"),
        }
        return {name: version for name, version in found.items() if version is not None}
