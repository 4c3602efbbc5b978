"""The location of files that piecegraph keeps between runs and could recreate: converted models, compiled pieces, and
facts about traffic."""

from __future__ import annotations

from pathlib import Path

from piecegraph import environment

TRAFFIC = "traffic"
"""The name of the folder of `traffic_folder` under the root."""


def cache_root() -> Path:
    """Return the directory under which all our caches lie. The directory need not exist.

    It is `PIECEGRAPH_CACHE_DIR` if that is set, else the platform's user cache directory.
    """
    chosen = environment.read(environment.CACHE_DIR)
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("piecegraph", appauthor=False)


def traffic_folder() -> Path:
    """Return the directory in which batch shapes and measured times of models are kept. It need not exist."""
    return cache_root() / TRAFFIC
