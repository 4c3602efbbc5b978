"""The choice between generation and pooling, made from a model's config file before anything is loaded."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource

RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")

_CLASSIFIERS = ("ForSequenceClassification", "ForTextClassification")
_ENCODERS = ("ForMaskedLM", "ForPreTraining")


class PoolingTask(enum.Enum):
    """What a pooling model returns of a text."""

    EMBED = "embed"
    CLASSIFY = "classify"
    TOKEN_EMBED = "token_embed"  # an embedding of each token, by request, of a model that embeds


def pooling_task(config: EngineConfig) -> PoolingTask | None:
    """Return what a model is loaded for, or None if it is to generate.

    `runner` and `convert` decide, and for "auto" the model's files [vLLM's rules]: a model of sentence-transformers
    embeds; `architectures` of its config names a classifier, an encoder, a model without a head, or a model that
    generates. Raises `ConfigError` for unknown values or a contradiction.
    """
    for name, known in (("runner", RUNNERS), ("convert", CONVERSIONS)):
        value = getattr(config, name)
        if value not in known:
            raise ConfigError(f"{name}={value!r} is unknown.{did_you_mean(str(value), known)}")
    given = {"embed": PoolingTask.EMBED, "classify": PoolingTask.CLASSIFY}.get(config.convert)
    if config.runner == "generate":
        if given is not None:
            raise ConfigError(
                f"runner='generate' and convert={config.convert!r} contradict each other; give runner='pooling'."
            )
        return None
    if given is not None:
        return given
    found = _task_of_files(config.source)
    return (found or PoolingTask.EMBED) if config.runner == "pooling" else found


def _task_of_files(source: ModelSource) -> PoolingTask | None:
    """Return the task that a model's files name, or None; whether the files are valid is checked by loading."""
    architecture = str(next(iter(_written_config(source).get("architectures") or ()), ""))
    if architecture.endswith(_CLASSIFIERS):
        return PoolingTask.CLASSIFY
    is_headless = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if architecture.endswith(_ENCODERS) or is_headless or model_file(source, "modules.json") is not None:
        return PoolingTask.EMBED
    return None


def _written_config(source: ModelSource) -> Mapping[str, Any]:
    file = model_file(source, "config.json")
    try:
        written = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = {**written, **source.hf_overrides} if isinstance(written, Mapping) else {}
    return found if isinstance(found.get("architectures") or [], list | tuple) else {}


def model_file(source: ModelSource, name: str) -> Path | None:
    """Return the path of a model's file, in its folder or fetched from the hub; None if there is none."""
    if source.is_gguf:
        return None
    folder = Path(source.location)
    try:
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
    except OSError:  # loading says what is wrong with the path
        return None
    if folder.is_absolute() or source.location.count("/") > 1:
        return None
    from transformers.utils import cached_file

    try:
        found = cached_file(
            source.location, name, revision=source.revision, _raise_exceptions_for_missing_entries=False
        )
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)
