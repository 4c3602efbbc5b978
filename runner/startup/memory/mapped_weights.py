"""The weights in memory that can be unmapped, for an engine that sleeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.errors import ConfigError
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.device_memory.cuda_memory import CudaMemoryDriver, MemoryDriver, unavailable_reason
from piecegraph.runner.device_memory.mapped_weights import MappedWeights
from piecegraph.runner.device_memory.restorable_storages import restorable
from piecegraph.runner.models.load import LoadedModel

if TYPE_CHECKING:
    pass


def map_weights(
    config: EngineConfig, loaded: LoadedModel, compiled: CompiledModel, on_phase: OnPhase | None
) -> MappedWeights | None:
    """Move the weights into memory that can be unmapped, before anything is captured; None: nothing needs that.

    Raises `ConfigError` for what cannot sleep on a GPU.
    """
    if not config.enable_sleep_mode or loaded.device.type == "cpu":
        return None
    reason = unavailable_reason(loaded.device)
    for is_so, what in (
        (bool(reason), f"{loaded.device}, because {reason}"),
        (config.speculative is not None, "speculative_config on a GPU"),
        (config.enable_lora, "enable_lora on a GPU"),
    ):
        if is_so:
            raise ConfigError(f"enable_sleep_mode=True is not yet available with {what}; leave it out.")
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
