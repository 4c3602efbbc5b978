"""The pieces of a model that are known to run eagerly, as the cache has noted. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.tools.cache.entries.entry_view import view
from piecegraph.tools.cache.entries.model_key import model_key


def eager_pieces(config: EngineConfig) -> Mapping[str, str]:
    """Return why unique pieces run eagerly, by index, when the model was compiled with this config.

    These are the pieces that Inductor failed on, or that failed their own checks. The result is empty for a model that
    the cache does not have. Raises what `LLM` would for the model and the config.
    """
    cache = CompileCache.open(config.compile)
    if config.compile.compiler != "inductor" or not cache.stores_plans:
        return {}
    key = model_key(config).key
    loaded = None if key is None else cache.load(key)
    return {} if loaded is None else view(loaded.entry).eager_pieces
