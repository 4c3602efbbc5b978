"""Entries as the compiler writes them (docs/cache_format.md), made without compiling, and the command line on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Saved, Store
from piecegraph.compiler.triton.kernel_pack import KernelFiles, pack
from piecegraph.tools.cli import main

NOW = 1_800_000_000.0
VERSIONS = {"piecegraph": "0.1.0", "torch": "2.13.0", "triton": "3.9.0", "transformers": "5.17.0", "python": "3.11.7"}
PROCESSOR = {"machine": "x86_64", "isa": "AVX2", "flags": "f" * 16}
CPU = {"device": "cpu", "cpu": PROCESSOR}
GPU = {"index": 0, "name": "NVIDIA H200", "capability": "9.0", "driver": "580.1", "cuda": "13.0"}
H200 = {"device": "cuda", "cpu": PROCESSOR, "gpu": GPU}
BUILD = {"torch": "2.13.0 a1b2", "triton": "3.9.0", "python": "3.11.7", "piecegraph": "0.1.0", "sources": "5" * 64}


@dataclass(frozen=True)
class Model:
    """A model that is in a store."""

    plan: Entry
    pieces: tuple[Entry, ...]  # one dynamic, then one at each static size


def save_piece(store: Store, name: str, size: int | None = None, **factors: Any) -> Entry:
    """Save a piece; `name` is its graph."""
    blobs = {
        "piece": json.dumps({"kernels": 2, "nodes": 9, "note": "", "post_grad": []}).encode(),
        "artifact": b"\x80\x04 what torch unpickles \x00" + name.encode(),
        "library/" + "e" * 64: b"\x7fELF\x00" + name.encode() * 50,
        "graph": f"{name}: placeholder -> mul -> output\n".encode(),
        "code": f"def call(args):  # {name}\n\treturn args\n".encode(),
    }
    made_of = {
        "kind": "piece",
        "format": 1,
        "build": BUILD,
        "machine": CPU,
        "graph": name,
        "size": size,
        "options": {"max_autotune": False},
        "passes": [],
        **factors,
    }
    notes = {"nodes": 9, "kernels": 2, "size": size}
    return save(store, made_of, blobs, {"compile": 2.0, "tune": 0.5}, notes)


def save_model(store: Store, name: str = "tiny", *, eps: float = 1e-6, layers: int = 3, **factors: Any) -> Model:
    """Save a decoder, whose pieces are here one and its static twin and depend on `eps` alone."""
    pieces = (save_piece(store, f"layer eps={eps}"), save_piece(store, f"layer eps={eps}", size=8))
    steps: list[dict[str, Any]] = []
    for index in range(layers):
        steps += [{"piece": index, "unique": 0, "inputs": ["x"], "outputs": ["x"]}, {"call": {"op": "ns::attention"}}]
    plan = {
        "format": 1,
        "plan": {"arguments": ["x"], "bound": [], "steps": steps, "results": ["x"]},
        "size_symbols": {"s0": "num_tokens"},
        "symbols": [["s0"]],
        "pieces": [pieces[0].key],
        "static": [{"unique": 0, "size": 8, "key": pieces[1].key}],
    }
    source = f'"""{name}"""\n\n\ndef forward(x):\n    x = piece_0(x)  # eps {eps}\n    return (x,)\n'
    blobs = {"plan": json.dumps(plan).encode(), "guards": b"[]", "source": source.encode()}
    modules = {f"layers.{index}.norm": {"class": "RMSNorm", "eps": eps} for index in range(layers)}
    made_of = {
        "kind": "plan",
        "format": 1,
        "build": {**BUILD, "transformers": "5.17.0"},
        "machine": CPU,
        "config": {"compile_sizes": [8], "passes": ["select-rows-early"]},
        "dynamic_dims": {"input_ids": {"0": "num_tokens"}},
        "model": {"class": name, "modules": modules},
        **factors,
    }
    notes = {
        "model": name,
        "num_pieces": layers,
        "num_unique_pieces": 1,
        "num_parameters": 134_500_000,
        "dtype": "bfloat16",
        "sizes": [8],
        "passes": {"select-rows-early": 1, "fuse-act-mul": layers},
        "pieces": [piece.key for piece in pieces],
    }
    return Model(save(store, made_of, blobs, {"trace": 1.5, "split": 0.25}, notes), pieces)


def save_kernels(store: Store, of: str, *functions: str, **factors: Any) -> Entry:
    """Save kernels for `of`, the key of a plan: one of each function, and a module for their launchers."""
    kernels = {f"{index:064x}": {f"{name}.json": b"{}", f"{name}.cubin": b"\0"} for index, name in enumerate(functions)}
    blobs = {"triton/0": pack(KernelFiles(kernels, {"launcher/launcher.so": b"\x7fELF"}))}
    made_of = {"kind": "kernels", "format": 1, "of": of, "build": BUILD, "machine": H200, **factors}
    notes = {"kernels": len(functions), "functions": dict.fromkeys(functions, 1)}
    return save(store, made_of, blobs, {"compile": 4.0}, notes)


def save_library(store: Store, source: str, machine: Mapping[str, Any] = CPU) -> Entry:
    """Save the library of one of our C++ kernels."""
    made_of = {"kind": "library", "format": 1, "source": source, "flags": ["-O3"], "cxx": None, "machine": machine}
    return save(
        store, made_of, {"library": b"\x7fELF" + source.encode()}, {"compile": 0.5}, {"source": f"{source}.cpp"}
    )


def save(
    store: Store,
    factors: Mapping[str, Any],
    blobs: Mapping[str, bytes],
    seconds: Mapping[str, float],
    notes: Mapping[str, Any],
    **changed: Any,
) -> Entry:
    """Save an entry made at the store's time; `changed` are fields of `Entry`."""
    entry = Entry.of(factors, blobs, created=store.clock(), seconds=seconds, versions=VERSIONS, notes=notes)
    entry = replace(entry, **changed)
    assert isinstance(store.save(entry, blobs), Saved)
    return entry


class CacheCommand:
    """A runner of `piecegraph cache ...` that keeps its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code = 0
        self.out = ""
        self.err = ""

    def __call__(self, *args: str, code: int = 0) -> str:
        """Run the command and return its stdout. Fails unless it ends with `code`."""
        self._capsys.readouterr()
        self.code = main(["cache", *args])
        self.out, self.err = self._capsys.readouterr()
        assert self.code == code, self.err
        return self.out

    def json(self, *args: str, code: int = 0) -> Any:
        """Run the command and return the one JSON value it prints."""
        return json.loads(self(*args, "--json", code=code))
