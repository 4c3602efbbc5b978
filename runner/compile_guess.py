"""Whether a start will compile anything, guessed before torch is imported and a key could be made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from piecegraph.compiler.stored.cache_choice import open_store, what_is_kept
from piecegraph.runner.engine_config import EngineConfig


def will_compile(config: EngineConfig) -> bool:
    """True where nothing is kept, and where the cache has no plan of a model of this kind that this torch and this
    transformers made; also False for a model whose kind cannot be told: then nothing is gained, and nothing lost.

    Raises what opening the cache raises, and what is wrong with the model's config.
    """
    if config.compile.compiler == "eager":
        return False
    keeps, _ = what_is_kept(config.compile)
    if keeps is not True:
        return True
    kind = _kind(config)
    entries = (row.file.entry for row in open_store(config.compile).list())
    return kind is not None and not any(
        entry is not None and kind.is_of(entry.notes) and _is_of_today(entry.versions) for entry in entries
    )


class _Kind(NamedTuple):
    """What a model's config says of its class."""

    architectures: tuple[str, ...]
    model_type: str

    def is_of(self, notes: Mapping[str, Any]) -> bool:
        """A plan with these notes is of such a model. transformers may load another class of the same type."""
        return notes.get("model") in self.architectures or f".models.{self.model_type}." in str(notes.get("class"))


def _kind(config: EngineConfig) -> _Kind | None:
    """None where there is no config on this machine, or one that names no class."""
    source = config.source
    folder = Path(source.model)
    if not folder.is_dir():
        files = () if source.is_gguf else source.weight_files
        if not files:
            return None
        folder = files[0].parent
    values: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architectures = tuple(map(str, values.get("architectures") or ()))
    return _Kind(architectures, str(values.get("model_type"))) if architectures else None


def _is_of_today(versions: Mapping[str, str]) -> bool:
    return all(_plain(versions.get(name)) == _plain(_version(name)) for name in ("torch", "transformers"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _plain(text: str | None) -> str | None:
    """Without what names the build: `2.13.0+cpu` is called 2.13.0 by who installed it."""
    return None if text is None else text.partition("+")[0]
