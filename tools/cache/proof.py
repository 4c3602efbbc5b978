"""Whether a stored piece is what compiling its graph makes, and computes what its graph says. Imports torch, compiles,
and runs what is stored; only entries that were authenticated come here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import fx

from piecegraph.cache.keys import diff_factors, plain
from piecegraph.cache.store import Loaded
from piecegraph.compiler.compile_pool import CompileFailure, CompileJob, CompilePool, CompileResult
from piecegraph.compiler.inductor_files import LoadedPiece, PieceFiles, load_files
from piecegraph.compiler.own_sources import OF_PIECES
from piecegraph.compiler.piece_format import load_piece
from piecegraph.compiler.post_grad import PostGrad
from piecegraph.compiler.private_folder import private_folder
from piecegraph.compiler.stored.machine_factors import build_factors, machine_factors, settings_factors
from piecegraph.compiler.stored.piece_store import files_of
from piecegraph.passes.ops.all_ops import define_all_ops
from piecegraph.tools.cache.contents import safe_path
from piecegraph.tools.cache.elf import loaded_sections

SIZE = 8
"""What every size of a dynamic piece is in a run."""

SEED = 0

_VIEWS = frozenset({"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "contiguous"})


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of one check. `problem` is empty where it holds."""

    problem: str = ""
    detail: str = ""
    is_wrong: bool = False  # the entry computes something else; otherwise nothing could be proved
    output_digest: str | None = None  # sha256 of what a run gave


class Prover:
    """A context manager: pieces are compiled in a process of its own, which ends with it."""

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
        """Compile the graph of a piece again, with the choices that tuning made: generated code, and what is loaded of
        C++ libraries, must be the same, bit for bit."""
        obstacle = self._obstacle(loaded)
        if obstacle is not None:
            return obstacle
        factors, stored = loaded.entry.factors, files_of(loaded)
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

    def run(self, loaded: Loaded) -> Proof:
        """Run a piece on inputs from a seed, and its graph by eager torch on the same."""
        obstacle = self._obstacle(loaded)
        if obstacle is not None:
            return obstacle
        try:
            done = load_files(files_of(loaded), self._triton)
        except Exception as error:  # unpickling and dlopen raise anything
            return Proof("cannot be loaded", f"{type(error).__name__}: {error}")
        size = loaded.entry.factors["size"]
        text = loaded.blobs["graph.json"].decode()
        with torch.no_grad():
            return _compared(done, text, size)

    def _obstacle(self, loaded: Loaded) -> Proof | None:
        """Why nothing can be proved here."""
        if "graph.json" not in loaded.blobs:
            return Proof("cannot be compiled again", "its graph is no plain data")
        factors = loaded.entry.factors
        gpu = factors["machine"].get("gpu")
        if gpu is not None and not torch.cuda.is_available():
            return Proof("another machine", f"it was compiled for {gpu['name']}; there is no GPU here")
        device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu["index"])
        build, machine = build_factors(OF_PIECES), machine_factors(device)
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
            sizes=_sizes(loaded.blobs["graph.json"].decode(), factors["size"]),
            post_grad=PostGrad().as_data(),
        )
        self._pool.submit([job])
        (result,) = self._pool.results()
        return result


def _without_serial(code: str) -> str:
    """Generated code but for the number of the compile in its process."""
    return re.sub(r"^# AOT ID: .*$", "", code, flags=re.MULTILINE)


def _are_same(left: Mapping[str, bytes], right: Mapping[str, bytes]) -> bool:
    if left.keys() != right.keys():
        return False
    return all(_comparable(data) == _comparable(right[name]) for name, data in left.items())


def _comparable(library: bytes) -> dict[str, bytes]:
    """What is loaded of it, but for the path of its source, which is in messages of checks."""
    return {name: re.sub(rb"/[^\0]*\.main\.cpp", b"", data) for name, data in loaded_sections(library).items()}


def _sizes(text: str, size: int | None) -> dict[str, int] | None:
    """A number for each symbol of a static piece."""
    return None if size is None else {symbol["name"]: size for symbol in json.loads(text)["symbols"]}


def _compared(done: LoadedPiece, text: str, size: int | None) -> Proof:
    number = SIZE if size is None else size
    _, examples = load_piece(text, _sizes(text, size))
    graph, _ = load_piece(text, _sizes(text, number))
    inputs, again = ([_input(each, number, generator) for each in examples] for generator in (_seeded(), _seeded()))
    outputs = list(done.run(*inputs))
    expected = list(graph(*(each for each in again if isinstance(each, torch.Tensor))))
    is_made = [not _is_uninitialized(node) for node in _results(graph)] + [True] * len(inputs)
    digest = hashlib.sha256()
    values = zip([*outputs, *inputs], [*expected, *again], is_made, strict=True)
    for position, (found, wanted, is_computed) in enumerate(values):
        if not isinstance(found, torch.Tensor) or not is_computed:
            continue
        digest.update(found.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        error = _relative_error(found, wanted)
        allowed = _allowed(wanted.dtype)
        if not error <= allowed:
            detail = f"value {position} is {error:.1e} off what its graph gives; {allowed:.1e} is allowed"
            return Proof("computes something else", detail, is_wrong=True)
    return Proof(output_digest=digest.hexdigest())


def _results(graph: fx.GraphModule) -> list[Any]:
    """The nodes of its results."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results = output.args[0]
    return list(results) if isinstance(results, tuple | list) else [results]


def _is_uninitialized(node: Any) -> bool:
    """Room that another piece or a split op fills, seen through views."""
    while isinstance(node, fx.Node) and str(node.target) in _VIEWS:
        node = node.args[0]
    name = str(getattr(node, "target", ""))
    return "empty" in name and isinstance(node, fx.Node) and node.op in ("call_function", "call_method")


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _input(example: Any, number: int, generator: torch.Generator) -> Any:
    """A tensor or size like `example`, in which every symbol is `number`. Whole numbers are below it: they may be
    indices into something of that size."""
    if not isinstance(example, torch.Tensor):
        return _number(example, number)
    shape, strides = ([_number(each, number) for each in sizes] for sizes in (example.shape, example.stride()))
    if example.dtype.is_floating_point:
        values = torch.randn(shape, generator=generator).to(example.dtype)
    else:
        values = torch.randint(0, 2 if example.dtype == torch.bool else number, shape, generator=generator)
    made = torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)
    return made.copy_(values)


def _number(size: Any, number: int) -> int:
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, number)))
    return int(size)


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """RMS of the difference as a share of the RMS of `wanted`."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    wanted = wanted.double()
    size = float(wanted.square().mean().sqrt()) if wanted.numel() else 0.0
    error = float((found.double() - wanted).square().mean().sqrt()) if wanted.numel() else 0.0
    return error / size if size else error


def _allowed(dtype: torch.dtype) -> float:
    """Two right ways to round, and to add up in another order, differ by less."""
    return max(4 * torch.finfo(dtype).eps, 1e-4) if dtype.is_floating_point else 0.0
