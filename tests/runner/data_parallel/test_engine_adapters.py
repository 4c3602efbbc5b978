"""The front door's list of adapters, which tells the engines of each change in the order in which they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from piecegraph import LoRARequest
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.data_parallel.engine_adapters import EngineAdapters
from piecegraph.runner.lora.modules import LoraOptions, adapt_modules
from tests.runner.lora.adapters import write_adapter
from tests.runner.tiny_models import make_model


class Told:
    """Two engines that keep what they are told, with the lock of the list only."""

    num_engines = 2

    def __init__(self) -> None:
        self.adapters: EngineAdapters | None = None
        self.messages: list[tuple[int, str, tuple[Any, ...]]] = []

    def send(self, engine: int, name: str, *values: Any) -> None:
        assert self.adapters is not None and self.adapters._lock.locked(), "another thread could tell otherwise first"
        self.messages.append((engine, name, values))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def adapters(told: Told) -> EngineAdapters:
    config = EngineConfig(source=ModelSource(model="m"), enable_lora=True, max_cpu_loras=2, max_loras=2)
    options = LoraOptions(num_slots=2, max_rank=4)
    modules = adapt_modules(make_model("llama"), options, dtype=torch.float32, device=torch.device("cpu"))
    told.adapters = EngineAdapters(config, modules.without_weights(), torch.float32, cast(Any, told))
    return told.adapters


def test_engines_are_told_what_is_pinned_and_what_leaves(adapters: EngineAdapters, told: Told, tmp_path: Path) -> None:
    """A pinned adapter with its digest; one that is removed, or evicted, by its number."""
    requests = []
    for number in (1, 2, 3):
        write_adapter(make_model("llama"), tmp_path / str(number), number, target_modules=["q_proj"])
        requests.append(LoRARequest(f"a{number}", number, str(tmp_path / str(number))))
    first = adapters.add(requests[0])
    assert not told.messages  # each engine reads an adapter with the first request that names it
    assert adapters.pin(1) and not adapters.pin(9)
    assert told.messages == [(engine, "pin_lora", (requests[0], first.digest)) for engine in (0, 1)]
    told.messages.clear()
    adapters.add(requests[1])
    adapters.add(requests[2])  # in place of the second
    assert adapters.remove(1) and not adapters.remove(1)
    assert told.messages == [(engine, "remove_lora", (number,)) for number in (2, 1) for engine in (0, 1)]
