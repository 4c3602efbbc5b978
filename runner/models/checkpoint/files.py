"""The files of a model, checked before anything is made of them, and the errors that name them."""

from __future__ import annotations

import json
from pathlib import Path

from piecegraph.errors import CheckpointError, ModelError, ModelNotFound, shorten
from piecegraph.runner.common.model_source import ModelSource


def check_exists(source: ModelSource) -> None:
    """Raise `ModelNotFound`, `ModelError` or `CheckpointError` unless there may be a model at `source`.

    Of a hub id only its form is checked.
    """
    path = Path(source.model)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # the path is too long, or in a folder that cannot be read
        raise ModelNotFound(f"no model {shorten(source.model)!r}: {error.strerror}.") from error
    if source.is_gguf:
        if path.exists() and not path.is_file():  # opening a named pipe would block
            raise ModelNotFound(f"{source.model!r} is not a regular file.")
        if not path.is_file():
            raise ModelNotFound(f"no file {source.model!r}.")
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise CheckpointError(f"{source.model!r} is not a GGUF file (it does not begin with 'GGUF').")
    elif is_folder:
        for file in sorted((*path.glob("*.json"), *path.glob("*.jinja"))):
            if file.exists() and not file.is_file() and not file.is_dir():  # opening a named pipe would block
                raise ModelError(f"{str(file)!r} is not a regular file. Remove it, or replace it by the model's file.")
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"the folder {source.model!r} has no config.json, so it is not a model.")
    elif path.is_absolute() or source.model.startswith((".", "~")) or source.model.count("/") > 1:
        raise ModelNotFound(f"no folder {source.model!r}. Give a model folder, a .gguf file or a hub id (owner/name).")


def check_generation_config(source: ModelSource) -> None:
    """Raise `ModelError` for a local generation_config.json that transformers could not read."""
    file = Path(source.location) / "generation_config.json"
    if source.is_gguf or not file.is_file():
        return
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{file} is not valid JSON ({first_line(error)}). Correct it, or remove it.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds a {type(found).__name__}; an object is needed. Correct it, or remove it.")
    eos = found.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{file} has eos_token_id={eos!r}; it must be a token id, or a list of them.")


def check_weight_files(source: ModelSource) -> None:
    """Open every local weight file, so that a truncated one is found by reading its header alone.

    Raises `CheckpointError`, which names the file, also for a folder without weight files.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(source.location)
    if source.load_format == "dummy" or source.is_gguf or not folder.is_dir():
        return
    files, pickled = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.bin"))
    if not files and not pickled:
        raise CheckpointError(f"no weights to read at {source.model!r}: the folder has no .safetensors or .bin file.")
    for file in (*files, *pickled):
        if not file.is_file():  # opening a named pipe would block
            raise CheckpointError(f"{file} is not a regular file, so no weights can be read from it.")
    for file in files:
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is corrupt or truncated ({first_line(error)}). Copy or download the file again."
            ) from error


def not_found(source: ModelSource, error: OSError) -> str:
    """Return the message for a name that is no folder, and for which the hub raised `error`."""
    return (
        f"no model {source.model!r}: there is no such folder, and the hub returned none ({first_line(error)}). "
        "Check the name; offline (HF_HUB_OFFLINE) only models already downloaded are found."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of a message, and the second if the first ends in a colon, because it has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    is_heading = lines[0].endswith(":") and len(lines) > 1
    return (f"{lines[0]} {lines[1]}" if is_heading else lines[0]).rstrip(".")
