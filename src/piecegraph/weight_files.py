"""The files of a model's weights on this machine, and a hint to the system that they will be read soon."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def prefetch(files: Iterable[Path]) -> None:
    """Tell the operating system that `files` will be read soon (`POSIX_FADV_WILLNEED`), and return at once.

    A file that cannot be opened is left out: loading it reports the error. Systems without `posix_fadvise` ignore it.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with suppress(OSError), file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def weight_files(model: str, revision: str | None = None) -> tuple[Path, ...]:
    """Return the files that hold the weights of `model`, in the order of their names.

    `model` is a directory, a .gguf file or a hub id. The result is empty for anything else, for a hub id that has not
    been downloaded, and for formats other than GGUF and safetensors. Errors in a model are reported by loading it.
    """
    path = Path(model)
    if model.endswith(".gguf"):
        return (path,) if path.is_file() else ()
    try:
        return _safetensors(path if path.is_dir() else _hub_snapshot(model, revision or "main"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # absent, or not what it should hold
        return ()


def _safetensors(folder: Path) -> tuple[Path, ...]:
    """Return the one file, or those that the index names: the order in which transformers looks for them."""
    if not (folder / "config.json").is_file():
        return ()
    whole = folder / "model.safetensors"
    if whole.is_file():
        return (whole,)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return tuple(folder / name for name in sorted(set(index["weight_map"].values())))


def _hub_snapshot(model: str, revision: str) -> Path:
    """Return the directory of a model in the hub client's cache; `revision` is a branch, a tag or a commit."""
    from huggingface_hub import constants  # without the client itself

    repository = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    return repository / "snapshots" / commit
