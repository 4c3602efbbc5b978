"""A guess whether a start will compile anything, made without importing torch and so without a cache key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from piecegraph.compiler.store.cache_choice import open_store, resolve_cache_mode
from piecegraph.runner.common.engine_config import EngineConfig


def will_compile(config: EngineConfig) -> bool:
    """Return whether a start with this config is likely to compile.

    It is if the cache is disabled, or has no plan for a model of this architecture made by the installed versions of
    torch and transformers. False if the architecture is unknown: a wrong guess costs only time.

    Raises what opening the cache raises, and the errors of a damaged model config.
    """
    if config.compile.compiler == "eager":
        return False
    keeps, _ = resolve_cache_mode(config.compile)
    if keeps is not True:
        return True
    architecture = _architecture(config)
    entries = (row.file.entry for row in open_store(config.compile).list())
    return architecture is not None and not any(
        entry is not None and architecture.matches(entry.notes) and _matches_installed_versions(entry.versions)
        for entry in entries
    )


class _Architecture(NamedTuple):
    """The model classes that a model's config names."""

    architectures: tuple[str, ...]
    model_type: str

    def matches(self, notes: Mapping[str, Any]) -> bool:
        """Return whether a plan with these notes belongs to such a model.

        transformers may load another class with the same model type.
        """
        return notes.get("model") in self.architectures or f".models.{self.model_type}." in str(notes.get("class"))


def _architecture(config: EngineConfig) -> _Architecture | None:
    """Return the model's architecture, or None if there is no local config or the config names no class."""
    source = config.source
    folder = Path(source.model)
    if not folder.is_dir():
        files = () if source.is_gguf else source.weight_files
        if not files:
            return None
        folder = files[0].parent
    values: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architectures = tuple(map(str, values.get("architectures") or ()))
    return _Architecture(architectures, str(values.get("model_type"))) if architectures else None


def _matches_installed_versions(versions: Mapping[str, str]) -> bool:
    """Return whether `versions` of torch and transformers are the installed ones."""
    return all(_public(versions.get(name)) == _public(_version(name)) for name in ("torch", "transformers"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _public(text: str | None) -> str | None:
    """Return a version without its local part (`+cpu`), which a package's metadata may leave out."""
    return None if text is None else text.partition("+")[0]
