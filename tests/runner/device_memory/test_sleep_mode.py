"""What cannot sleep on a GPU is refused when the device is known, before anything is read or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.device_memory import sleep_mode
from piecegraph.runner.device_memory.sleep_mode import check_sleep_mode
from piecegraph.runner.startup import rank_device
from piecegraph.runner.startup.load_engine import load_engine

GPU = torch.device("cuda")


def config(**options: Any) -> EngineConfig:
    source = ModelSource(model=str(Path("no", "such", "model")))
    return EngineConfig(source=source, device="cuda", enable_sleep_mode=True, **options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"enable_lora": True}, "with enable_lora on a GPU"),
        (
            {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2)},
            "with speculative_config on a GPU",
        ),
        ({}, "on cuda, because no CUDA driver is installed"),
    ],
)
def test_what_cannot_sleep_is_refused_before_anything_is_read(
    options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even the model's folder, which does not exist here."""
    monkeypatch.setattr(rank_device, "resolve_device", lambda device: GPU)
    monkeypatch.setattr(sleep_mode, "unavailable_reason", lambda device: "no CUDA driver is installed")
    with pytest.raises(ConfigError, match=what):
        load_engine(config(**options), None)


def test_what_can_sleep_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_mode, "unavailable_reason", lambda device: None)
    check_sleep_mode(config(), GPU)
    check_sleep_mode(config(enable_lora=True), torch.device("cpu"))
