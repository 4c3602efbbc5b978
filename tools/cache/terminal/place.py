"""The location of this invocation's cache, and the options all subcommands have."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from piecegraph import environment
from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.errors import CacheError
from piecegraph.paths import cache_root


@dataclass(frozen=True, slots=True)
class Place:
    """A cache root, which need not exist."""

    root: Path
    set_by: str  # the option or variable that decided it, or "the platform"
    signing_key_file: Path | None = None  # or several, as `read_trusted_keys` takes them
    publish: bool = False  # what is saved is signed with that key, and readable by others

    def open(self) -> Store:
        """Open the cache. Raises `CacheError` with what to do."""
        try:
            return Store.open(self.root, signing_key_file=self.signing_key_file, publish=self.publish)
        except OSError as error:
            raise CacheError(f"the cache at {self.root} (set by {self.set_by}) cannot be read: {error}") from error

    def open_to_change(self) -> Store:
        """Open the cache as `open` does; also raises `CacheError` for another user's cache, which is read-only."""
        store = self.open()
        if store.access is Access.READ_ONLY:
            raise CacheError(
                f"the cache at {self.root} (set by {self.set_by}) belongs to another user and is only read; run this "
                "as its owner."
            )
        return store


def place(cache_dir: Path | None, signing_key_file: Path | None) -> Place:
    """Return the location that the option gives, else the environment, else the platform."""
    if signing_key_file is None and (named := environment.read(environment.SIGNING_KEY_FILE)) is not None:
        signing_key_file = Path(named)
    if cache_dir is not None:
        return Place(cache_dir.expanduser().absolute(), "--cache-dir", signing_key_file)
    is_set = environment.read(environment.CACHE_DIR) is not None
    return Place(cache_root(), environment.CACHE_DIR if is_set else "the platform", signing_key_file)


class CacheDir(click.Path):
    """The type of `--cache-dir`: a path that is not empty. An empty one would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Fails for an empty one."""
        if value == "":
            self.fail("it is empty; name a folder.", param, ctx)
        return super().convert(value, param, ctx)


def cache_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every subcommand; its function receives `place` and `as_json`.

    An OSError on a file in the cache becomes a `CacheError`, unless the subcommand handles it itself.
    """

    @click.option("--cache-dir", type=CacheDir(path_type=Path), help="Folder of the cache, instead of the usual one.")
    @click.option(
        "--signing-key",
        "signing_key_files",
        type=click.Path(exists=True, path_type=Path),
        multiple=True,
        help="Key file, public, private or shared, or a folder of them, whose entries count like your own. Repeatable.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
    @click.option("--debug", is_flag=True, help="Show tracebacks.")
    @functools.wraps(function)
    def with_place(cache_dir: Path | None, signing_key_files: tuple[Path, ...], debug: bool, **values: Any) -> Any:
        named = os.pathsep.join(map(str, signing_key_files))
        chosen = place(cache_dir, Path(named) if named else None)
        try:
            return function(place=chosen, **values)
        except OSError as error:
            if not isinstance(error.filename, str | Path) or not Path(error.filename).is_relative_to(chosen.root):
                raise
            raise CacheError(
                f"the cache at {chosen.root} (set by {chosen.set_by}) cannot be read, or changed: {error}"
            ) from error

    return with_place


def say_if_there_is_none(place: Place, num_entries: int) -> None:
    """Print a line on stderr for a cache without entries."""
    if num_entries == 0:
        exists = place.root.is_dir()
        what = f"the cache at {place.root} has no entries" if exists else f"there is no cache at {place.root} yet"
        click.echo(what, err=True)
