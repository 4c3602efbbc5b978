"""An entry as files that one can read and step through."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Sequence
from pathlib import Path

import click

from piecegraph.errors import CacheError
from piecegraph.tools.cache.entries.contents import ContentFile


def dump(files: Sequence[ContentFile], folder: Path) -> list[str]:
    """Write `files` below `folder`, and depyf's view of the stitched module; return the paths written, relative to it.

    No existing file is replaced. Raises `CacheError` if the folder is not empty or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CacheError(f"{folder} is not empty; name a folder that is new or empty.")
        written = [_write(folder, file.path, file.data if file.text is None else file.text.encode()) for file in files]
        for file in files:
            if file.path.endswith("stitched.py") and file.text is not None:
                view = decompiled(file.text)
                written += [_write(folder, "stitched.decompiled.py", view.encode())] if view is not None else []
    except OSError as error:
        raise CacheError(f"{folder} cannot be written: {error}.") from error
    return written


def _write(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return name


def decompiled(source: str) -> str | None:
    """Return depyf's decompilation of the bytecode of `forward` in `source`; None without depyf.

    It shows what Python does, step by step. The source is compiled, and not run. Imports torch.
    """
    if importlib.util.find_spec("depyf") is None:
        click.echo("depyf is not installed: no decompiled view (pip install depyf)", err=True)
        return None
    try:
        import depyf

        module = compile(source, "stitched.py", "exec", dont_inherit=True)
        functions = [each for each in module.co_consts if isinstance(each, types.CodeType)]
        return "\n".join(str(depyf.decompile(each)) for each in functions)
    except Exception as error:  # depyf knows some versions of Python's bytecode, and says so in its own ways
        click.echo(f"depyf cannot decompile the stitched module: {type(error).__name__}: {error}", err=True)
        return None
