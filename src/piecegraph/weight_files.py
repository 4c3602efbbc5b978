"""Where a model's weights lie on this machine: the files that loading it will read."""

from __future__ import annotations

import json
from pathlib import Path


def weight_files(model: str, revision: str | None = None) -> tuple[Path, ...]:
    """The files that hold the weights of `model` (a folder, a .gguf file or a hub id), in the order of their names.

    Empty when it is none of these, when the hub's have not been downloaded yet, and for formats other than GGUF and
    safetensors. What is wrong with a model is not said here; loading it does.
    """
    path = Path(model)
    if model.endswith(".gguf"):
        return (path,) if path.is_file() else ()
    try:
        return _safetensors(path if path.is_dir() else _hub_snapshot(model, revision or "main"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # absent, or not what it should hold
        return ()


def _safetensors(folder: Path) -> tuple[Path, ...]:
    """One file, or those that the index names: transformers looks for them in this order."""
    if not (folder / "config.json").is_file():
        return ()
    whole = folder / "model.safetensors"
    if whole.is_file():
        return (whole,)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return tuple(folder / name for name in sorted(set(index["weight_map"].values())))


def _hub_snapshot(model: str, revision: str) -> Path:
    """The folder in the hub client's cache; `revision` is a branch, a tag or a commit."""
    from huggingface_hub import constants  # without the client itself

    repository = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    return repository / "snapshots" / commit
