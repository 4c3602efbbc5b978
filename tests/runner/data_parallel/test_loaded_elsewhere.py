"""What the front door of several engines checks before it waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piecegraph import environment
from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.data_parallel.engine_processes import gpus_of_engine
from piecegraph.runner.data_parallel.loaded_elsewhere import check_gpus


def config(device: str | None) -> EngineConfig:
    return EngineConfig(source=ModelSource(model="m"), data_parallel_size=2, tensor_parallel_size=2, device=device)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0,1", "2,3"]), ("7,GPU-a,5,4", ["7,GPU-a", "5,4"]), ("7,6,5", ["7,6", "5"]), ("", ["", ""])],
)
def test_each_engine_sees_its_gpus(visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which this process sees them."""
    monkeypatch.delenv(environment.GPUS, raising=False)
    if visible is not None:
        monkeypatch.setenv(environment.GPUS, visible)
    assert [gpus_of_engine(config("cuda"), number)[environment.GPUS] for number in range(2)] == expected
    assert gpus_of_engine(config("cpu"), 1) == {}
    sharing = replace(config("cuda"), enable_expert_parallel=True)
    together = ",".join(filter(None, expected))
    assert [gpus_of_engine(sharing, number)[environment.GPUS] for number in range(2)] == [together, together]


def test_gpus_for_all_ranks_of_all_engines() -> None:
    for device, num_gpus in (("cpu", 1), (None, 0), (None, 4), ("cuda", 4)):
        check_gpus(config(device), num_gpus)
    for device in ("cuda", None):
        with pytest.raises(ConfigError, match="data_parallel_size=2 engines of 2 ranks need 4 GPUs, and torch sees 3"):
            check_gpus(config(device), 3)
    with pytest.raises(ConfigError, match="device='cuda:1' with 2 engines, each of which has its GPU; give 'cuda'"):
        check_gpus(config("cuda:1"), 4)
