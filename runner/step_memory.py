"""What the largest step takes of the GPU's memory: measured by the first start, and kept in the cache for others.

Measuring it runs the step twice, which loads every kernel that any option of sampling takes: a third of a second of a
start from the cache, most of it for requests that may never come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from piecegraph import environment
from piecegraph.compiler.graphs.growing_segments import as_the_program_set_it
from piecegraph.compiler.own_sources import OF_PLANS
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.kept_json import KeptJson
from piecegraph.compiler.stored.machine_factors import build_factors, machine_factors
from piecegraph.compiler.torch_compat import allocator_settings
from piecegraph.progress import OnPhase, Phase

STEP_FORMAT = 1
"""Of the blob; part of every key."""

ROLE = "step"

GAPS_BYTES = 32 * 2**20
"""That a step may have found in gaps of what was in use where it was measured, and not elsewhere."""

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "PYTORCH_NO_CUDA_MEMORY_CACHING")
"""Of the environment, that change what libraries and torch allocate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of the device, in whole pieces of torch's allocator."""

    peak_bytes: int  # held while the largest step runs without graphs
    stays_bytes: int  # that the first step leaves in use: workspaces, and kernels that it loads

    @property
    def total_bytes(self) -> int:
        """What must be left free by who has not run a step yet."""
        return self.peak_bytes + self.stays_bytes + GAPS_BYTES


def step_factors(of: str, device: torch.device, step: Mapping[str, Any]) -> dict[str, Any]:
    """`of`: the key of the model's plan; `step`: what else its largest step depends on."""
    return {
        "kind": "step",
        "format": STEP_FORMAT,
        "of": of,
        "build": build_factors(OF_PLANS),
        "machine": machine_factors(device),
        "allocator": as_the_program_set_it(allocator_settings()),
        "variables": {name: environment.read(name) for name in _VARIABLES},
        "step": dict(step),
    }


class KeptStepMemory:
    """The entry of one step, over one cache. Nothing here raises for what a disk says."""

    def __init__(self, cache: CompileCache, of: str, device: torch.device, step: Mapping[str, Any]) -> None:
        self._kept = KeptJson(cache, step_factors(of, device, step), ROLE)

    def load(self) -> StepMemory | None:
        """What was measured; None where nothing is kept, or nothing that can be used."""
        return self._kept.load(_step_memory)

    def save(self, measured: StepMemory, seconds: float) -> None:
        """Keep it, where that goes. `seconds`: what measuring it took."""
        self._kept.save(asdict(measured), seconds={"profile": seconds}, notes=asdict(measured))


def _step_memory(said: Any) -> StepMemory:
    found = StepMemory(peak_bytes=said["peak_bytes"], stays_bytes=said["stays_bytes"])
    if not all(type(each) is int and each >= 0 for each in asdict(found).values()):
        raise ValueError(f"it has {found}")
    return found


def kept_or_measured(kept: KeptStepMemory | None, measure: Callable[[], StepMemory], on_phase: OnPhase | None) -> int:
    """Bytes that must be free for the largest step, as the phase `profile`. `kept`: None where no cache is used.

    What was measured just now leaves its workspaces in use; what an earlier process has measured counts them.
    """
    began = time.perf_counter()
    found = None if kept is None else kept.load()
    if found is None:
        measured = measure()
        if kept is not None:
            kept.save(measured, time.perf_counter() - began)
        num_bytes, whence = measured.peak_bytes, "measured"
    else:
        num_bytes, whence = found.total_bytes, "measured by an earlier start"
    if on_phase is not None:
        detail = f"{num_bytes / 2**20:.0f} MiB for the largest step, {whence}"
        on_phase(Phase(name="profile", seconds=time.perf_counter() - began, detail=detail))
    return num_bytes
