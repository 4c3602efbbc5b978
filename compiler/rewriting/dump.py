"""Graphs and generated source as readable files, and as artifacts in torch's structured trace."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import fx

from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.errors import ConfigError


def write_pass(folder: str, name: str, before: str, after: str) -> None:
    """Write `passes/<name>.before.txt`, `.after.txt` and `.diff`: a graph around a pass."""
    directory = Path(folder) / "passes"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.before.txt").write_text(before)
        (directory / f"{name}.after.txt").write_text(after)
        (directory / f"{name}.diff").write_text(_diff(name, before, after))
    except OSError as error:
        raise _cannot_write(folder, error) from error


def emit_pass(name: str, before: Callable[[], str], after: Callable[[], str]) -> None:
    """Add the graph before and after a pass to torch's structured trace."""
    _emit_artifact(f"piecegraph_pass_{name}_before", before)
    _emit_artifact(f"piecegraph_pass_{name}_after", after)
    _emit_artifact(f"piecegraph_pass_{name}_diff", lambda: _diff(name, before(), after()))


def write_graphs(folder: str, graph_module: fx.GraphModule, unique: Sequence[UniquePiece]) -> None:
    """Write `graph.py` (the whole traced graph), and `piece_<n>.py` and its canonical text per unique piece."""
    directory = Path(folder)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "graph.py").write_text(readable_source(graph_module))
        for piece in unique:
            (directory / f"piece_{piece.index}.py").write_text(readable_source(piece.graph_module))
            (directory / f"piece_{piece.index}.canonical.txt").write_text(piece.text + "\n")
    except OSError as error:
        raise _cannot_write(folder, error) from error


def write_source(folder: str, source: str) -> None:
    """Write `stitched.py`."""
    (Path(folder) / "stitched.py").write_text(source)


def emit_graphs(unique: Sequence[UniquePiece]) -> None:
    """Add the unique pieces to torch's structured trace."""
    for piece in unique:
        _emit_artifact(f"piecegraph_piece_{piece.index}", partial(readable_source, piece.graph_module))


def emit_source(source: str) -> None:
    """Add the stitched source to torch's structured trace."""
    _emit_artifact("piecegraph_stitched", lambda: source)


def readable_source(graph_module: fx.GraphModule) -> str:
    """Return a graph as Python with shapes, dtypes and the model's own lines as comments."""
    text: str = graph_module.print_readable(print_output=False)
    return text


def _diff(name: str, before: str, after: str) -> str:
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, f"{name}.before", f"{name}.after"))


def _cannot_write(folder: str, error: OSError) -> ConfigError:
    return ConfigError(f"dump_dir={folder!r} cannot be written: {error}. Name a folder you may write to.")


def _emit_artifact(name: str, text: Callable[[], str]) -> None:
    """Add `text()` under `name` to torch's structured trace (tlparse), where one is being written."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
