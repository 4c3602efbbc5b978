"""The device that a model runs on."""

from __future__ import annotations

import torch

from piecegraph.errors import ConfigError


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return `device`, or for None the GPU if there is one, else the CPU. Raises `ConfigError`."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"device={device!r} is not a device; e.g. 'cpu' or 'cuda'.") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={device!r}, but torch sees no NVIDIA GPU. Use device='cpu', or install a CUDA build."
        )
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} cannot run here; use 'cpu' or 'cuda'.")
    if resolved.type == "cuda" and resolved.index not in (None, current := torch.cuda.current_device()):
        raise ConfigError(
            f"device={device!r}, but this process's current GPU is cuda:{current}, where kernels are launched. Call "
            f"torch.cuda.set_device({resolved.index}) first, or show the process that GPU alone: "
            f"CUDA_VISIBLE_DEVICES={resolved.index}."
        )
    return resolved
