"""A piece that Inductor compiled, as bytes: its artifact and every file that loading it would look for or build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from torch import fx

from piecegraph.compiler.as_it_is import run_graph
from piecegraph.compiler.cpp_libraries import cpp_libraries
from piecegraph.compiler.inductor_artifact import kernels_in_use, load_artifact
from piecegraph.compiler.inductor_caches import inductor_cache_dir
from piecegraph.compiler.inductor_options import no_compile_workers
from piecegraph.compiler.private_folder import private_folder
from piecegraph.compiler.triton_groups import in_folder, without_folder

TRITON_FOLDER = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFiles:
    """Whoever loads these vouches for them: they are unpickled and dlopened. So does who runs a graph that was data,
    which calls functions by their names."""

    artifact: bytes | None  # None: the piece runs as its graph (`as_it_is.py`), and there is nothing else
    libraries: Mapping[str, bytes] = field(default_factory=dict)  # C++ kernels by `library_digest`
    inductor: Mapping[str, bytes] = field(default_factory=dict)  # by path in Inductor's folder: what tuning found
    triton: Mapping[str, bytes] = field(default_factory=dict)  # by path in Triton's


@dataclass(frozen=True, slots=True)
class LoadedPiece:
    """A piece that runs, and where its files are."""

    run: Any
    folder: Path  # Inductor's, of this piece alone
    triton: Path  # Triton's, which pieces loaded together share
    files: PieceFiles
    graph: fx.GraphModule | None = None  # which it runs as

    @classmethod
    def of_graph(cls, graph: fx.GraphModule) -> LoadedPiece:
        """A piece that runs as its graph."""
        folder = private_folder("piece")
        return cls(run_graph(graph), folder, folder / TRITON_FOLDER, PieceFiles(artifact=None), graph)

    def with_tuning(self) -> PieceFiles:
        """Its files with what Triton built and tuning found meanwhile, and the kernels that are in use now."""
        if self.files.artifact is None:
            return self.files
        choices = {str(path.relative_to(self.folder)): path.read_bytes() for path in _choices(self.folder)}
        used = kernels_in_use(self.folder)
        triton = {
            str(path.relative_to(self.triton)): without_folder(path.name, path.read_bytes())
            for path in self.triton.rglob("*")
            if path.is_file() and (path.suffix == ".so" or path.relative_to(self.triton).parts[0] in used)
        }
        return PieceFiles(artifact=self.files.artifact, libraries=self.files.libraries, inductor=choices, triton=triton)

    def code(self) -> str:
        """The Python that Inductor generated, its kernels included; that of the graph, where it runs as such."""
        if self.graph is not None:
            return self.graph.code.strip() + "\n"
        wrappers = [path.read_text() for path in sorted(self.folder.rglob("*.py")) if "locks" not in path.parts]
        return "\n\n".join(wrappers)


def load_files(files: PieceFiles, triton: Path) -> LoadedPiece:
    """Write `files` to folders of this process's own, Triton's to `triton`, and load them from there.

    Nothing is compiled that is among them. The process's settings are as before when this returns. Raises what
    torch raises for an artifact it cannot read, and ValueError for a path that leads elsewhere.
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
        data = in_folder(target.name, data, target.parent)
        if target.exists():  # of another piece; it may be loaded, and what is loaded must not be written to
            if target.read_bytes() == data:
                continue
            target.unlink()
        target.write_bytes(data)


def _choices(folder: Path) -> list[Path]:
    """Files in which Inductor keeps what tuning chose."""
    return sorted(folder.rglob("*.best_config"))
