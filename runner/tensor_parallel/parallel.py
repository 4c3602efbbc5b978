"""How one rank takes part in an engine: its group, and the runner that keeps all ranks in step."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecegraph.runner.tensor_parallel.process_group import RankGroup

_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """One rank of an engine."""

    group: RankGroup
    runner_kind: Callable[..., Any]  # called as `ModelRunner`


def rank_facts(weight_files: Sequence[Path], *, config: str, graph: str) -> dict[str, str]:
    """Return what must be equal on all ranks, by name: software, config, graph and weights, the latter as digests."""
    import torch
    import transformers

    from piecegraph import __version__

    return {
        "version of piecegraph": __version__,
        "version of torch": str(torch.__version__),
        "version of transformers": transformers.__version__,
        "version of Python": platform.python_version(),
        "config of the model": _digest(config.encode()),
        "compiled graph": _digest(graph.encode()),
        "set of weights": weights_digest(weight_files),
    }


def weights_digest(files: Sequence[Path]) -> str:
    """Return a digest of the sizes of weight files and of bytes at evenly spaced places, at most a MiB of each file.

    Files that differ in a single value may have the same digest: whole files are not read, because they may have
    hundreds of gigabytes.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with file.open("rb") as opened:
            for index in range(_SAMPLES):
                opened.seek(index * size // _SAMPLES)
                digest.update(opened.read(min(_SAMPLE_BYTES, -(-size // _SAMPLES))))
    return digest.hexdigest()[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
