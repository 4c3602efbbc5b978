"""Settings of torch that hold for the whole process: read, compared, and set as another process has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo


def process_settings() -> dict[str, Any]:
    """Process-wide torch settings that change generated code, as plain values."""
    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def apply_process_settings(settings: Mapping[str, Any]) -> None:
    """Make this process's settings those of the one that called `process_settings`."""
    torch.set_num_threads(settings["num_threads"])
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_float32_matmul_precision(settings["float32_matmul_precision"])


def tracing_settings() -> dict[str, Any]:
    """Process-wide torch settings that change what a trace is, as plain values."""
    devices = ("cpu", "cuda")
    return {
        "autocast": {
            device: str(torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)
        },
        "default_device": str(torch.get_default_device()),
        "inference_mode": torch.is_inference_mode_enabled(),
    }


_SETTINGS_THAT_DECIDE_NOTHING = frozenset({"base_dir", "debug_dir_root"})  # paths of one machine


def inductor_settings_digest() -> str:
    """sha256 of how this process has Dynamo and Inductor set, hex: they may be set behind our back."""
    from torch._inductor import config as inductor_config

    found = {}
    for name, config in (("dynamo", torch._dynamo.config), ("inductor", inductor_config)):
        values = config.save_config_portable()
        found[name] = {
            key: sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)
            for key, value in values.items()
            if key not in _SETTINGS_THAT_DECIDE_NOTHING
        }
    return hashlib.sha256(repr([sorted(values.items()) for values in found.values()]).encode()).hexdigest()


def cpu_capability() -> str:
    """The instruction set torch's own kernels use."""
    return str(torch.backends.cpu.get_cpu_capability())
