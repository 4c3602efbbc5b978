"""The weights in memory that can be unmapped, for an engine that sleeps."""

from __future__ import annotations

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.device_memory.cuda_memory import CudaMemoryDriver, MemoryDriver
from piecegraph.runner.device_memory.mapped_weights import MappedWeights
from piecegraph.runner.device_memory.restorable_storages import restorable
from piecegraph.runner.models.load import LoadedModel


def map_weights(
    config: EngineConfig, loaded: LoadedModel, compiled: CompiledModel, on_phase: OnPhase | None
) -> MappedWeights | None:
    """Move the weights into memory that can be unmapped, before anything is captured; None: nothing needs that."""
    if not config.enable_sleep_mode or loaded.device.type == "cpu":
        return None
    with timed_phase(on_phase, "sleep mode"):
        return mapped_weights(loaded.model, compiled, CudaMemoryDriver(loaded.device))


def mapped_weights(module: torch.nn.Module, compiled: CompiledModel, driver: MemoryDriver) -> MappedWeights:
    """Move everything that `module` and the pieces compiled from it hold into memory of `driver`. Raises `OutOfMemory`.

    No graph may have been captured.
    """
    weights = MappedWeights(driver)
    reloaded = {tensor.untyped_storage().data_ptr() for tensor in restorable(module)}
    own = [*module.parameters(), *module.buffers()]
    compiled.move_weights(lambda bound: weights.move([*own, *bound], reloaded))
    return weights
