"""The files of a piece that Inductor compiled: its artifact and every file that loading it would read or build."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from torch import fx

from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.compiler.inductor.artifact import kernels_in_use, load_artifact
from piecegraph.compiler.inductor.caches import inductor_cache_dir
from piecegraph.compiler.inductor.cpp_libraries import cpp_libraries
from piecegraph.compiler.inductor.options import no_compile_workers
from piecegraph.compiler.splitting.passthrough import build_graph_runner, is_autocast_on
from piecegraph.compiler.triton.groups import with_absolute_paths, with_relative_paths

TRITON_FOLDER = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFiles:
    """The files of a compiled piece, by name.

    Loading unpickles and dlopens them, so the caller must have authenticated them. The same holds for a graph that was
    stored as data, which calls functions by their names.
    """

    artifact: bytes | None  # None: the piece runs as its graph, and there are no other files
    libraries: Mapping[str, bytes] = field(default_factory=dict)  # C++ kernels by `library_digest`
    inductor: Mapping[str, bytes] = field(default_factory=dict)  # results of tuning, by path in Inductor's folder
    triton: Mapping[str, bytes] = field(default_factory=dict)  # kernels, by path in Triton's folder


@dataclass(frozen=True, slots=True)
class LoadedPiece:
    """A piece that can run, with the folders of its files."""

    run: Any
    folder: Path  # Inductor's folder, of this piece alone
    triton: Path  # Triton's folder, shared by pieces that are loaded together
    files: PieceFiles
    graph: fx.GraphModule | None = None  # the graph that runs, if the piece runs as its graph

    @classmethod
    def of_graph(cls, graph: fx.GraphModule) -> LoadedPiece:
        """Return a piece that runs as `graph`."""
        folder = private_folder("piece")
        return cls(
            build_graph_runner(graph, casts=is_autocast_on()),
            folder,
            folder / TRITON_FOLDER,
            PieceFiles(artifact=None),
            graph,
        )

    def with_tuning(self) -> PieceFiles:
        """Return the files with the results of tuning, and with the kernels that are in use now."""
        if self.files.artifact is None:
            return self.files
        choices = {str(path.relative_to(self.folder)): path.read_bytes() for path in _choices(self.folder)}
        used = kernels_in_use(self.folder)
        triton = {}
        for path in self.triton.rglob("*"):
            parts = path.relative_to(self.triton).parts
            if (path.suffix != ".so" and parts[0] not in used) or any(part.startswith("tmp.") for part in parts):
                continue  # of another piece, or being written by another process
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                triton["/".join(parts)] = with_relative_paths(path.name, path.read_bytes())
        return PieceFiles(artifact=self.files.artifact, libraries=self.files.libraries, inductor=choices, triton=triton)

    def code(self) -> str:
        """Return the generated Python code, kernels included, or the code of the graph if the piece runs as it."""
        if self.graph is not None:
            return self.graph.code.strip() + "\n"
        wrappers = [path.read_text() for path in sorted(self.folder.rglob("*.py")) if "locks" not in path.parts]
        return "\n\n".join(wrappers)


def load_files(files: PieceFiles, triton: Path) -> LoadedPiece:
    """Write `files` to private folders of this process (Triton's to `triton`) and load the piece from there.

    Kernels and libraries among the files are not compiled again. The process's settings are restored. Raises what torch
    raises for an artifact that it cannot read, and ValueError for a path outside the folder.
    """
    folder = private_folder("piece")
    _write(folder, files.inductor)
    _write(triton, files.triton)
    known = {digest: folder / "library" / f"{digest}.so" for digest in files.libraries}
    _write(folder / "library", {f"{digest}.so": data for digest, data in files.libraries.items()})
    assert files.artifact is not None, "a piece that runs as its graph has no files"
    with (
        inductor_cache_dir(folder, triton),
        no_compile_workers(),
        cpp_libraries(known),
    ):
        run = load_artifact(files.artifact)
    return LoadedPiece(run, folder, triton, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"{name!r} leads out of the folder")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        data = with_absolute_paths(target.name, data, target.parent)
        if target.exists():  # of another piece; a loaded library must not be overwritten
            if target.read_bytes() == data:
                continue
            target.unlink()
        target.write_bytes(data)


def _choices(folder: Path) -> list[Path]:
    """Return the files in which Inductor records the choices of tuning."""
    return sorted(folder.rglob("*.best_config"))
