"""The choice of a cache, and of what is kept in it, by the config and the environment. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from piecegraph import environment
from piecegraph.cache.store.store import Store
from piecegraph.config import CACHE_MODES, CompileConfig
from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.paths import cache_root


def open_store(config: CompileConfig) -> Store:
    """Open the store that `config` names. Raises `CacheError` or OSError for a folder that cannot be trusted."""
    root = cache_root() if config.cache_dir is None else Path(config.cache_dir).expanduser().absolute()
    key_file = config.signing_key_file or environment.read(environment.SIGNING_KEY_FILE)
    return Store.open(root, signing_key_file=None if key_file is None else Path(key_file))


def resolve_cache_mode(config: CompileConfig) -> tuple[bool | str, str]:
    """Return what is kept of the compiles of `config`, a value of `CompileConfig.cache`, and why not everything.

    Raises `ConfigError` for an unknown value of `PIECEGRAPH_CACHE`.
    """
    mode = _chosen_mode(config)
    if config.compiler == "eager":
        return False, "eager pieces are not stored"
    if config.dump_dir is not None:
        return False, "dump_dir shows a compile"
    return mode


def _chosen_mode(config: CompileConfig) -> tuple[bool | str, str]:
    """Return the more restrictive of the modes of the config and of the environment, and why not everything is kept."""
    text = environment.read(environment.CACHE)
    if text is not None and text not in CACHE_MODES:
        wanted = ", ".join(CACHE_MODES)
        raise ConfigError(f"{environment.CACHE}={text!r}; it is one of {wanted}.{did_you_mean(text, CACHE_MODES)}")
    by_environment = True if text is None else CACHE_MODES[text]
    order = list(CACHE_MODES.values())
    if order.index(by_environment) < order.index(config.cache):
        return by_environment, f"{environment.CACHE}={text}"
    return config.cache, "" if config.cache is True else f"cache={config.cache!r}"
