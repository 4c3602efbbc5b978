"""Where piecegraph keeps what it may lose: converted models now, compiled pieces later."""

from __future__ import annotations

from pathlib import Path

from piecegraph import environment


def cache_root() -> Path:
    """The folder under which every cache of ours lies; it need not exist yet.

    `PIECEGRAPH_CACHE_DIR` decides if it is set, else the user's cache directory of the platform.
    """
    chosen = environment.read(environment.CACHE_DIR)
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("piecegraph", appauthor=False)
