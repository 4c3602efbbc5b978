"""How one rank takes part in an engine: its group, and the runner that keeps all ranks in step."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.lora.modules import AdaptedModules
from piecegraph.runner.tensor_parallel.engine_peers import EnginePeers
from piecegraph.runner.tensor_parallel.numbered_locals import with_numbered_locals
from piecegraph.runner.tensor_parallel.process_group import RankGroup

if TYPE_CHECKING:
    from piecegraph.runner.pipeline_parallel.stage import Stage

_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """One rank of an engine."""

    group: RankGroup  # those that divide its layers among them: all ranks, or those of its stage
    runner_kind: Callable[..., Any]  # called as `ModelRunner`
    world: RankGroup | None = None  # all ranks, which exchange values at start; None: those of `group`
    stage: Stage | None = None  # its stage of a pipeline; None: there is one stage
    peers: EnginePeers | None = None  # the engines that it shares experts with; None: there are none
    connect_others: Callable[[torch.device], None] = lambda device: None  # stages or engines, at about the same time
    take_other_connections: Callable[[], Sequence[Callable[[], None]]] = (
        tuple  # what closes connections to other stages
    )

    def abort(self, is_over: Callable[[], bool]) -> None:
        """End what this rank's GPU waits for, with ranks and stages, until `is_over`; nothing can run after it."""
        self.group.abort(is_over, others=self.take_other_connections())

    @property
    def everyone(self) -> RankGroup:
        """All ranks of the engine."""
        return self.group if self.world is None else self.world

    def all_layers(self, layers: tuple[AttentionLayer, ...]) -> tuple[AttentionLayer, ...]:
        """Return the attention layers of all stages, in the model's order; waits until every rank has its own."""
        own = json.dumps([asdict(layer) for layer in layers], default=_dtype_name)
        found: dict[str, AttentionLayer] = {}
        for text in self.everyone.exchange("layers", own):  # ranks of one stage have the same
            for fields in json.loads(text):
                dtypes = {name: getattr(torch, fields[name]) for name in ("dtype", "cache_dtype") if fields[name]}
                found[fields["name"]] = AttentionLayer(**{**fields, **dtypes})
        return tuple(found.values())

    def all_adapted(self, adapted: AdaptedModules) -> AdaptedModules:
        """Return the modules that adapters may change, beside those of all stages; waits until all have theirs."""
        if self.stage is None:
            return adapted
        texts = self.everyone.exchange("adapted modules", json.dumps(adapted.facts()))
        return adapted.with_stages([json.loads(text) for text in texts])


def _dtype_name(dtype: object) -> str:
    """Return `float32` for `torch.float32`."""
    assert isinstance(dtype, torch.dtype), dtype
    return str(dtype).removeprefix("torch.")


def graph_facts(graph: str) -> dict[str, str]:
    """Return what must be equal on all ranks that divide the same layers: a digest of the compiled graph.

    `graph`: its source in Python. Names of local variables do not count, only the order in which they appear: a rank
    that traced other models before has other numbers in them.
    """
    return {"compiled graph": _digest(with_numbered_locals(graph).encode())}


def rank_facts(weight_files: Sequence[Path], *, config: str) -> dict[str, str]:
    """Return what must be equal on all ranks, by name: software, config and weights, the latter two as digests."""
    import transformers

    from piecegraph import __version__

    return {
        "version of piecegraph": __version__,
        "version of torch": str(torch.__version__),
        "version of transformers": transformers.__version__,
        "version of Python": platform.python_version(),
        "config of the model": _digest(config.encode()),
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
