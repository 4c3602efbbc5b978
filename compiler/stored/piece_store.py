"""Compiled pieces in the cache: one entry a unique piece, dynamic or at one size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from piecegraph.cache.entry import Entry
from piecegraph.cache.store import Loaded, NotSaved
from piecegraph.compiler.inductor_files import LoadedPiece, PieceFiles, load_files
from piecegraph.compiler.own_sources import OF_PIECES
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.piece_compiler import RunPiece
from piecegraph.compiler.piece_format import load_graph
from piecegraph.compiler.post_grad import PostGrad, PostGradOutcome
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.machine_factors import build_factors, machine_factors, settings_factors
from piecegraph.compiler.stored.piece_proof import NotRun, OutputDigest, proof_as_data, proof_from_data, prove

PIECE_FORMAT = 2
"""Of a piece's blobs; part of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFacts:
    """What is known of a compiled piece beside its files."""

    nodes: int
    kernels: int | None
    note: str = ""
    takes: tuple[int, ...] | None = None  # positions of the dynamic piece's inputs that it takes; None: all
    post_grad: tuple[PostGradOutcome, ...] = ()
    graph: str = ""  # canonical text
    graph_data: str | None = None  # as `piece_format` writes it; None: it is no plain data
    seconds: Mapping[str, float] = field(default_factory=dict)
    proof: OutputDigest | NotRun | None = None  # None: nobody tried

    def adapted(self, run: RunPiece) -> RunPiece:
        """`run` for the inputs of the dynamic piece."""
        if self.takes is None:
            return run
        if len(self.takes) == 1:
            (position,) = self.takes
            return lambda *inputs: run(inputs[position])
        chosen = itemgetter(*self.takes)
        return lambda *inputs: run(*chosen(inputs))


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece from the cache that runs."""

    run: RunPiece
    facts: PieceFacts
    seconds: float  # what loading it took


def piece_factors(
    piece: UniquePiece, size: int | None, options: Mapping[str, Any], post_grad: PostGrad
) -> dict[str, Any]:
    """All that decides what Inductor makes of a piece. `key_of` of it raises `KeyFactorError` for options that hold
    an object."""
    device = device_of_piece(piece)
    casts = {"autocast": str(torch.get_autocast_dtype(device.type))} if torch.is_autocast_enabled(device.type) else {}
    return {
        "kind": "piece",
        "format": PIECE_FORMAT,
        "graph": piece.key,
        "size": size,
        "options": dict(options),
        "passes": [each.uuid() for each in post_grad.passes],
        "build": build_factors(OF_PIECES),
        "machine": machine_factors(device),
        "settings": settings_factors(),
        **casts,
    }


def device_of_piece(piece: UniquePiece) -> torch.device:
    """Where it computes: what it takes from the CPU may be sizes."""
    devices = [value.device for value in piece.examples if isinstance(value, torch.Tensor)]
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


class PieceStore:
    """Loads pieces, and saves those that were compiled, over one cache. Nothing here raises for what a disk says."""

    def __init__(self, cache: CompileCache, triton: Path) -> None:
        self._cache = cache
        self._triton = triton

    def load(self, key: str) -> StoredPiece | None:
        """The piece under `key`, loaded; None: compile it. What is wrong with an entry is noted in the cache."""
        read = self.read(key)
        return None if read is None else self.loaded(key, read)

    def read(self, key: str) -> Loaded | None:
        """What is under `key`, authenticated, and nothing done with it yet."""
        return self._cache.load(key)

    def loaded(self, key: str, loaded: Loaded) -> StoredPiece | None:
        """What was read under `key`, as `load` gives it."""
        begin = time.perf_counter()
        try:
            facts = facts_of(loaded)
            done = load_stored(loaded, self._triton)
        except Exception as error:  # unpickling and dlopen raise anything
            self._cache.reject(key, f"loading it: {type(error).__name__}: {error}")
            return None
        return StoredPiece(facts.adapted(done.run), facts, time.perf_counter() - begin)

    def save(self, factors: Mapping[str, Any], facts: PieceFacts, done: LoadedPiece) -> str | None:
        """Keep a piece with what tuning found, and the digest of what it computes; why not, if not."""
        facts = replace(facts, proof=prove(done, facts.graph_data, factors["size"]))
        blobs = blobs_of(facts, done.with_tuning(), done.code())  # what a run chose is kept: it decides the digest
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
    """A piece by role (docs/cache.md)."""
    described = {
        "nodes": facts.nodes,
        "kernels": facts.kernels,
        "note": facts.note,
        "takes": facts.takes,
        "post_grad": [outcome.as_data() for outcome in facts.post_grad],
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
    """Inductor compiled it; otherwise it runs as its graph."""
    return "artifact" in loaded.blobs


def load_stored(loaded: Loaded, triton: Path) -> LoadedPiece:
    """The piece of an entry; files that Triton looks for go to `triton`. Raises whatever unpickling and dlopen do, and
    KeyError for an entry that is no piece's."""
    if has_artifact(loaded):
        return load_files(files_of(loaded), triton)
    return LoadedPiece.of_graph(load_graph(loaded.blobs["graph.json"].decode()))


def files_of(loaded: Loaded) -> PieceFiles:
    """The files of an entry."""
    return PieceFiles(
        artifact=loaded.blobs.get("artifact"),
        libraries=_below("library", loaded.blobs),
        inductor=_below("inductor", loaded.blobs),
        triton=_below("triton", loaded.blobs),
    )


def facts_of(loaded: Loaded) -> PieceFacts:
    """What an entry says of its piece. Raises KeyError, ValueError, TypeError for one that says something else."""
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
    )


def _below(role: str, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(f"{role}/"): data for name, data in blobs.items() if name.startswith(f"{role}/")}
