"""Compiled pieces in the cache: one entry per unique piece, dynamic or at one static size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.keys import key_of
from piecegraph.cache.store.store import Loaded, NotSaved
from piecegraph.compiler.common.call_targets import NotStorable
from piecegraph.compiler.common.piece_errors import eager_note
from piecegraph.compiler.inductor.files import LoadedPiece, PieceFiles, load_files
from piecegraph.compiler.keys.machine_factors import build_factors, machine_factors, settings_factors
from piecegraph.compiler.keys.own_sources import PIECE_SOURCES
from piecegraph.compiler.piece_compilers.protocol import Fallback, RunPiece
from piecegraph.compiler.rewriting.post_grad import PostGrad, PostGradOutcome
from piecegraph.compiler.splitting.passthrough import build_graph_runner
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.piece_format import load_graph
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.store.piece_proof import NotRun, OutputDigest, proof_as_data, proof_from_data, prove
from piecegraph.compiler.tracing.python_kernels import (
    called_ops,
    has_python_kernels,
    own_function_fact,
    own_functions,
    python_kernels_fact,
)
from piecegraph.compiler.tracing.read_facts import NotComparable
from piecegraph.errors import KeyFactorError

PIECE_FORMAT = 3
"""The version of the format of a piece's blobs; part of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFacts:
    """The facts of a compiled piece, besides its files."""

    nodes: int
    kernels: int | None
    note: str = ""
    takes: tuple[int, ...] | None = None  # positions of the dynamic piece's inputs that the piece takes; None: all
    post_grad: tuple[PostGradOutcome, ...] = ()
    graph: str = ""  # canonical text
    graph_data: str | None = None  # as `piece_format` writes it; None: it is not plain data
    seconds: Mapping[str, float] = field(default_factory=dict)
    proof: OutputDigest | NotRun | None = None  # None: no run was attempted
    writes: tuple[int, ...] = ()  # positions of inputs that the piece changes in place
    eager_reason: str = ""  # why it runs as its graph instead of compiled code; "": it was compiled

    def adapted(self, run: RunPiece) -> RunPiece:
        """Return `run` as a function of the inputs of the dynamic piece."""
        if self.takes is None:
            return run
        if len(self.takes) == 1:
            (position,) = self.takes
            return lambda *inputs: run(inputs[position])
        chosen = itemgetter(*self.takes)
        return lambda *inputs: run(*chosen(inputs))


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece from the cache that can run."""

    run: RunPiece
    facts: PieceFacts
    seconds: float  # of loading
    fallback: Fallback | None = None  # of a piece that Inductor compiled


def piece_factors(
    piece: UniquePiece, size: int | None, options: Mapping[str, Any], post_grad: PostGrad
) -> dict[str, Any]:
    """Return everything that determines the code that Inductor generates for a piece.

    `key_of` of the result raises `KeyFactorError` if the options hold an object.
    """
    device = device_of_piece(piece)
    casts = {"autocast": str(torch.get_autocast_dtype(device.type))} if torch.is_autocast_enabled(device.type) else {}
    return {
        "kind": "piece",
        "format": PIECE_FORMAT,
        "graph": piece.key,
        "size": size,
        "options": dict(options),
        "passes": [each.uuid() for each in post_grad.passes],
        "build": build_factors(PIECE_SOURCES),
        "machine": machine_factors(device),
        "settings": settings_factors(),
        **casts,
        **_kernels(piece),
    }


def _kernels(piece: UniquePiece) -> dict[str, Any]:
    """Return the kernels that the piece's ops have from Python, which Inductor may trace through. Raises
    `KeyFactorError`."""
    try:
        found = {name: python_kernels_fact(name) for name in called_ops(piece.graph_module) if has_python_kernels(name)}
        for function in own_functions(piece.graph_module):
            own_function_fact(function)  # which the piece's key has
    except NotComparable as error:
        raise KeyFactorError(f"an op of a piece has a {error}, of which no key can be made.") from None
    return {"kernels": found} if found else {}


def device_of_piece(piece: UniquePiece) -> torch.device:
    """Return the device on which a piece computes; CPU tensors may be sizes of a piece on another device."""
    devices = [value.device for value in piece.examples if isinstance(value, torch.Tensor)]
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


class PieceStore:
    """The compiled pieces in one cache. No method raises for disk errors."""

    def __init__(self, cache: CompileCache, triton: Path) -> None:
        self._cache = cache
        self._triton = triton

    def load(self, key: str) -> StoredPiece | None:
        """Return the piece under `key`; None, with the reason in the cache's `misses`, if it must be compiled."""
        read = self.read(key)
        return None if read is None else self.loaded(key, read)

    def read(self, key: str) -> Loaded | None:
        """Return the authenticated entry under `key` without loading the piece; None if there is no usable one."""
        return self._cache.load(key)

    def loaded(self, key: str, loaded: Loaded) -> StoredPiece | None:
        """Load the piece of an entry that `read` returned; None if that fails."""
        begin = time.perf_counter()
        try:
            facts = facts_of(loaded)
            done = load_stored(loaded, self._triton)
        except Exception as error:  # unpickling and dlopen raise anything
            self._cache.reject(key, f"loading it: {type(error).__name__}: {error}")
            return None
        fallback = None
        if done.graph is None and facts.graph_data is not None:
            fallback = Fallback(partial(_as_graph, facts.graph_data), facts.writes)
        return StoredPiece(facts.adapted(done.run), facts, time.perf_counter() - begin, fallback)

    def save_as_graph(self, key: str, reason: str) -> str:
        """Save the piece under `key` as its graph, for a plan in which it failed its own checks; return the new key.

        The entry under `key` stays. Raises `NotStorable`, and KeyError, TypeError or ValueError for an entry that is
        not a piece's.
        """
        loaded = self.read(key)
        if loaded is None or "graph.json" not in loaded.blobs:
            raise NotStorable("the graph of the piece is not in the cache")
        graph = load_graph(loaded.blobs["graph.json"].decode())
        factors = {**loaded.entry.factors, "runs": "as its graph"}
        facts = replace(facts_of(loaded), kernels=None, note=eager_note(reason), eager_reason=reason, post_grad=())
        why = self.save(factors, facts, LoadedPiece.of_graph(graph))
        if why is not None:
            raise NotStorable(why)
        return key_of(factors)

    def save(self, factors: Mapping[str, Any], facts: PieceFacts, done: LoadedPiece) -> str | None:
        """Save a piece with its tuning results and output digest; return why that failed, or None."""
        facts = replace(facts, proof=prove(done, facts.graph_data, factors["size"]))
        blobs = blobs_of(
            facts, done.with_tuning(), done.code()
        )  # includes the choices of the proof's run, which determine the digest
        entry = Entry.of(
            factors,
            blobs,
            created=time.time(),
            seconds=facts.seconds,
            versions=self._cache.versions(),
            notes={"nodes": facts.nodes, "kernels": facts.kernels, "size": factors["size"]},
        )
        saved = self._cache.save(entry, blobs)
        return saved.reason if isinstance(saved, NotSaved) else None


def blobs_of(facts: PieceFacts, files: PieceFiles, code: str) -> dict[str, bytes]:
    """Return the blobs of a piece by role (docs/cache_format.md)."""
    described = {
        "nodes": facts.nodes,
        "kernels": facts.kernels,
        "note": facts.note,
        "takes": facts.takes,
        "post_grad": [outcome.as_data() for outcome in facts.post_grad],
        "writes": facts.writes,
        "eager": facts.eager_reason,
        "proof": None if facts.proof is None else proof_as_data(facts.proof),
    }
    blobs = {
        "piece": json.dumps(described).encode(),
        "graph": facts.graph.encode(),
        "code": code.encode(),
        **{f"library/{digest}": data for digest, data in files.libraries.items()},
        **{f"triton/{path}": data for path, data in files.triton.items()},
        **{f"inductor/{path}": data for path, data in files.inductor.items()},
    }
    if files.artifact is not None:
        blobs["artifact"] = files.artifact
    if facts.graph_data is not None:
        blobs["graph.json"] = facts.graph_data.encode()
    return blobs


def has_artifact(loaded: Loaded) -> bool:
    """Return whether Inductor compiled the piece of an entry; otherwise it runs as its graph."""
    return "artifact" in loaded.blobs


def load_stored(loaded: Loaded, triton: Path) -> LoadedPiece:
    """Load the piece of an entry; the files that Triton looks for go to the folder `triton`.

    Raises whatever unpickling and dlopen raise, and KeyError for an entry that is not a piece's.
    """
    if has_artifact(loaded):
        return load_files(files_of(loaded), triton)
    return LoadedPiece.of_graph(load_graph(loaded.blobs["graph.json"].decode()))


def files_of(loaded: Loaded) -> PieceFiles:
    """Return the files of an entry."""
    return PieceFiles(
        artifact=loaded.blobs.get("artifact"),
        libraries=_below("library", loaded.blobs),
        inductor=_below("inductor", loaded.blobs),
        triton=_below("triton", loaded.blobs),
    )


def facts_of(loaded: Loaded) -> PieceFacts:
    """Return the facts in an entry. Raises KeyError, ValueError or TypeError for an entry that is not a piece's."""
    described = json.loads(loaded.blobs["piece"])
    takes: Sequence[int] | None = described["takes"]
    data, proof = loaded.blobs.get("graph.json"), described.get("proof")
    return PieceFacts(
        nodes=described["nodes"],
        kernels=described["kernels"],
        note=described["note"],
        takes=None if takes is None else tuple(takes),
        post_grad=tuple(map(PostGradOutcome.from_data, described["post_grad"])),
        graph=loaded.blobs["graph"].decode(),
        graph_data=None if data is None else data.decode(),
        seconds=loaded.entry.seconds,
        proof=None if proof is None else proof_from_data(proof),
        writes=tuple(described["writes"]),
        eager_reason=described["eager"],
    )


def _as_graph(graph_data: str) -> RunPiece:
    return build_graph_runner(load_graph(graph_data))


def _below(role: str, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(f"{role}/"): data for name, data in blobs.items() if name.startswith(f"{role}/")}
