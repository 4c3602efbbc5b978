"""`EngineAdapters`, the LoRA adapters of several engines, as their front door sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from piecegraph.runner.lora.store import AdapterStore

if TYPE_CHECKING:
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
    from piecegraph.runner.lora.modules import AdaptedModules


class EngineAdapters(AdapterStore):
    """A store that checks adapters and counts them; each engine reads those of its own requests itself.

    What leaves this store leaves the engines' too, so that a number whose adapter is replaced means the new one
    everywhere. With each adapter engines are told its digest here, and refuse other files. Any thread may call any
    method; engines are told of changes with the lock, so in the order in which they are made.
    """

    def __init__(
        self, config: EngineConfig, modules: AdaptedModules, dtype: torch.dtype, processes: EngineProcesses
    ) -> None:
        """`modules`: those of an engine, without weights."""
        assert config.max_cpu_loras is not None, "resolved in EngineConfig"
        super().__init__(modules, capacity=config.max_cpu_loras, dtype=dtype, device=torch.device("cpu"))
        self._processes = processes

    def _keep(self, number: int) -> None:
        adapter = self._adapters[number]
        self._tell("pin_lora", adapter.request, adapter.digest)
        super()._keep(number)

    def _drop(self, number: int) -> None:
        self._tell("remove_lora", number)
        super()._drop(number)

    def _tell(self, name: str, *values: object) -> None:
        for engine in range(self._processes.num_engines):
            self._processes.send(engine, name, *values)
