"""Process-wide settings of torch: read as plain data, and applied in another process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo


def process_settings() -> dict[str, Any]:
    """Return the process-wide torch settings that change generated code, as plain values."""
    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "autocast": _autocasts(),
    }


def apply_process_settings(settings: Mapping[str, Any]) -> None:
    """Apply settings that `process_settings` read in another process."""
    torch.set_num_threads(settings["num_threads"])
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    casts = settings.get("autocast", {})  # entries of earlier versions lack the key
    for device in _AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device, device in casts)
        if device in casts:
            torch.set_autocast_dtype(device, getattr(torch, casts[device].removeprefix("torch.")))


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _autocasts() -> dict[str, str]:
    return {
        device: str(torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    }


def tracing_settings() -> dict[str, Any]:
    """Return the process-wide torch settings that change a trace, as plain values."""
    return {
        "autocast": _autocasts(),
        "autocast_dtypes": {device: str(torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES},
        "default_device": str(torch.get_default_device()),
        "inference_mode": torch.is_inference_mode_enabled(),
    }


_IRRELEVANT_SETTINGS = frozenset({"base_dir", "debug_dir_root"})  # paths of one machine


def inductor_settings_digest() -> str:
    """Return the sha256 (hex) of the settings of Dynamo and Inductor in this process, which anybody may change."""
    from torch._inductor import config as inductor_config

    found = {}
    for name, config in (("dynamo", torch._dynamo.config), ("inductor", inductor_config)):
        values = config.save_config_portable()
        found[name] = {
            key: sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)
            for key, value in values.items()
            if key not in _IRRELEVANT_SETTINGS
        }
    return hashlib.sha256(repr([sorted(values.items()) for values in found.values()]).encode()).hexdigest()


def cpu_capability() -> str:
    """Return the name of the instruction set that torch's own CPU kernels use."""
    return str(torch.backends.cpu.get_cpu_capability())
