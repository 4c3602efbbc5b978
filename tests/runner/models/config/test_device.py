"""The device is the one that was named, or the current GPU; others are refused by name."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.models.config.device import resolve_device


def test_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(None) == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device='cuda', but torch sees no NVIDIA GPU"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="device='gpu' is not a device"):
        resolve_device("gpu")
    with pytest.raises(ConfigError, match="device='meta' cannot run here"):
        resolve_device("meta")


def test_another_gpu_than_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the current one, whatever tensors say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert resolve_device("cuda:0") == resolve_device(None) == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"current GPU is cuda:0.*torch\.cuda\.set_device\(1\)"):
        resolve_device("cuda:1")
