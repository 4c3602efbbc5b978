"""Checks that a stored piece equals what compiling its graph makes, and computes the same as it did then.

The checks import torch, compile, and run what is stored; only entries that were authenticated get here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from piecegraph.cache.store.keys import diff_factors, plain
from piecegraph.cache.store.store import Loaded
from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.compiler.inductor.files import LoadedPiece, PieceFiles, load_files
from piecegraph.compiler.keys.machine_factors import build_factors, machine_factors, settings_factors
from piecegraph.compiler.keys.own_sources import PIECE_SOURCES
from piecegraph.compiler.rewriting.post_grad import PostGrad
from piecegraph.compiler.splitting.passthrough import needs_no_codegen
from piecegraph.compiler.splitting.piece_format import load_piece
from piecegraph.compiler.store.piece_proof import SEED, OutputDigest, Trial, digest_of, running, sizes_of
from piecegraph.compiler.store.piece_store import facts_of, files_of, has_artifact, load_stored
from piecegraph.compiler.torch_compat.process_settings import apply_process_settings, process_settings
from piecegraph.compiler.workers.pool import CompileFailure, CompileJob, CompilePool, CompileResult
from piecegraph.passes.ops.all_ops import define_all_ops
from piecegraph.tools.cache.entries.contents import safe_path
from piecegraph.tools.cache.entries.elf import loaded_sections


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of one check. `problem` is empty if the check passed; `detail` may then say how that is known."""

    problem: str = ""
    detail: str = ""
    is_wrong: bool = False  # the entry computes something else; otherwise nothing could be proved
    output_digest: str | None = None  # sha256 of what a run gave


class Prover:
    """A context manager that compiles pieces in a process of its own, which ends with the block."""

    def __init__(self) -> None:
        self._inductor, self._triton = private_folder("inductor"), private_folder("triton")
        self._pool: CompilePool | None = None
        self._exit = ExitStack()
        define_all_ops()

    def __enter__(self) -> Prover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def recompile(self, loaded: Loaded) -> Proof:
        """Compile the graph of a piece again, with the choices that tuning made.

        The generated code, and the loaded sections of C++ libraries, must be the same, bit for bit.
        """
        obstacle = self._obstacle(loaded)
        if obstacle is not None:
            return obstacle
        factors, stored = loaded.entry.factors, files_of(loaded)
        if not has_artifact(loaded):
            return self._same_graph(loaded)
        if factors["passes"]:
            return Proof("cannot be compiled again", "a pass ran inside Inductor, and is not part of the entry")
        for name, data in stored.inductor.items():
            file = self._inductor / safe_path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        result = self._compile(loaded)
        if isinstance(result, CompileFailure):
            return Proof("cannot be compiled again", result.reason.splitlines()[0])
        libraries = {name: path.read_bytes() for name, path in result.libraries.items()}
        again = PieceFiles(artifact=result.job.artifact.read_bytes(), libraries=libraries, inductor=stored.inductor)
        done = load_files(again, self._triton)
        if _without_serial(done.code()) != _without_serial(loaded.blobs["code"].decode()):
            return Proof("not reproducible", "the generated code is another")
        if not _are_same(libraries, stored.libraries):
            return Proof("not reproducible", "the code is the same, its C++ libraries are others")
        return Proof()

    def _same_graph(self, loaded: Loaded) -> Proof:
        """Check a piece that runs as its graph: the code must be that of the graph, and the graph must still run so."""
        graph, _ = load_piece(loaded.blobs["graph.json"].decode())
        if not needs_no_codegen(graph):
            return Proof("not reproducible", "it would be compiled now, and was kept as its graph")
        if LoadedPiece.of_graph(graph).code() != loaded.blobs["code"].decode():
            return Proof("not reproducible", "the code of its graph is another")
        return Proof()

    def run(self, loaded: Loaded) -> Proof:
        """Run a piece on inputs from the stored seed: the outputs must have the stored digest.

        Without a stored digest, the graph is run by eager torch on the same inputs, and `detail` says so.
        """
        obstacle = self._obstacle(loaded)
        if obstacle is not None:
            return obstacle
        try:
            done = load_stored(loaded, self._triton)
        except Exception as error:  # unpickling and dlopen raise anything
            return Proof("cannot be loaded", f"{type(error).__name__}: {error}")
        factors, text, stored = loaded.entry.factors, loaded.blobs["graph.json"].decode(), facts_of(loaded).proof
        try:
            with _settings(factors["settings"]):
                if isinstance(stored, OutputDigest):
                    return _same_digest(done, text, factors["size"], stored)
                why = "it was compiled by an older version" if stored is None else stored.reason
                return _compared(done, text, factors["size"], why)
        except Exception as error:  # whatever a kernel raises
            lacks_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            is_wrong = isinstance(stored, OutputDigest) and not lacks_memory  # it did run when it was compiled
            return Proof("cannot be run", f"{type(error).__name__}: {error}", is_wrong)

    def _obstacle(self, loaded: Loaded) -> Proof | None:
        """Return why nothing can be checked here."""
        if "graph.json" not in loaded.blobs:
            return Proof("cannot be compiled again", "its graph is not plain data")
        factors = loaded.entry.factors
        if "autocast" in factors:
            return Proof("cannot be compiled again", "it was compiled under autocast")
        gpu = factors["machine"].get("gpu")
        if gpu is not None and not torch.cuda.is_available():
            return Proof("another machine", f"it was compiled for {gpu['name']}; there is no GPU here")
        device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu["index"])
        build, machine = build_factors(PIECE_SOURCES), machine_factors(device)
        here = plain({"build": build, "machine": machine, "settings": settings_factors()})
        there = {name: factors[name] for name in here}
        for each in (here, there):
            each["settings"] = {"inductor": each["settings"]["inductor"]}  # the others are set for the compile
        differences = diff_factors(there, here)
        if differences:
            return Proof("another build or machine", f"{', '.join(each.path for each in differences)} differ")
        return None

    def _compile(self, loaded: Loaded) -> CompileResult | CompileFailure:
        if self._pool is None:
            self._pool = CompilePool(1, self._inductor, self._triton)
            self._exit.callback(self._pool.close)
        folder = private_folder("job")
        graph = folder / "graph.json"
        graph.write_bytes(loaded.blobs["graph.json"])
        factors = loaded.entry.factors
        job = CompileJob(
            index=0,
            graph=graph,
            artifact=folder / "artifact",
            weight=0,
            options=dict(factors["options"]),
            settings={name: value for name, value in factors["settings"].items() if name != "inductor"},
            sizes=None if factors["size"] is None else sizes_of(loaded.blobs["graph.json"].decode(), factors["size"]),
            post_grad=PostGrad().as_data(),
        )
        self._pool.submit([job])
        (result,) = self._pool.results()
        return result


def _without_serial(code: str) -> str:
    """Return generated code without the number of the compile in its process."""
    return re.sub(r"^# AOT ID: .*$", "", code, flags=re.MULTILINE)


def _are_same(left: Mapping[str, bytes], right: Mapping[str, bytes]) -> bool:
    if left.keys() != right.keys():
        return False
    return all(_comparable(data) == _comparable(right[name]) for name, data in left.items())


def _comparable(library: bytes) -> dict[str, bytes]:
    """Return the loaded sections of a library without the path of its source, which is in messages of checks."""
    return {name: re.sub(rb"/[^\0]*\.main\.cpp", b"", data) for name, data in loaded_sections(library).items()}


def _same_digest(done: LoadedPiece, text: str, size: int | None, stored: OutputDigest) -> Proof:
    """Check that the piece computes what it did when it was compiled."""
    trial = Trial(text, stored.sizes, stored.seed, is_static=size is not None)
    digest = digest_of(done, trial)
    if digest == stored.digest:
        return Proof(output_digest=digest)
    detail = f"its outputs have sha256 {digest}; when it was compiled they had {stored.digest}"
    return Proof("computes something else", detail, is_wrong=True)


def _compared(done: LoadedPiece, text: str, size: int | None, why: str) -> Proof:
    """Check that the piece computes what its graph does; `why` says why there is no digest."""
    trial = Trial(text, sizes_of(text, size), SEED, is_static=size is not None)
    with running(done, trial.device):
        inputs, again = trial.inputs(), trial.inputs()
        outputs = list(done.run(*inputs))
        expected = list(trial.graph(*(each for each in again if isinstance(each, torch.Tensor))))
        digest = trial.digest(inputs, outputs)
    values = zip([*outputs, *inputs], [*expected, *again], [*trial.is_computed, *(True for _ in inputs)], strict=True)
    for position, (found, wanted, is_computed) in enumerate(values):
        if not isinstance(found, torch.Tensor) or not is_computed:
            continue
        error, allowed = _relative_error(found, wanted), _allowed(wanted.dtype)
        if not error <= allowed:
            detail = f"value {position} is {error:.1e} off what its graph gives; {allowed:.1e} is allowed"
            return Proof("computes something else", detail, is_wrong=True)
    return Proof(
        detail=f"no digest was stored ({why}): compared with its graph, run by eager torch", output_digest=digest
    )


@contextmanager
def _settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Apply the settings of the process that compiled, inside this block."""
    wanted = {name: value for name, value in settings.items() if name != "inductor"}
    before = process_settings()
    if wanted == before:
        yield
        return
    apply_process_settings(wanted)
    try:
        yield
    finally:
        apply_process_settings(before)


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the RMS of the difference as a share of the RMS of `wanted`."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    wanted = wanted.double()
    size = float(wanted.square().mean().sqrt()) if wanted.numel() else 0.0
    error = float((found.double() - wanted).square().mean().sqrt()) if wanted.numel() else 0.0
    return error / size if size else error


def _allowed(dtype: torch.dtype) -> float:
    """Return the bound below which two correct ways to round, and to add up in another order, differ."""
    return max(4 * torch.finfo(dtype).eps, 1e-4) if dtype.is_floating_point else 0.0
