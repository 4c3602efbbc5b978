"""The GPU that a benchmark of kernels runs on."""

from __future__ import annotations

import click
import torch


def gpu_of_benchmark() -> torch.device:
    """Return the process's current GPU. Raises `click.ClickException` if there is none."""
    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no NVIDIA GPU; this benchmark needs one.")
    return torch.device("cuda", torch.cuda.current_device())


def describe(device: torch.device) -> str:
    """Return the name of the GPU and the versions that measure on it."""
    import triton

    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}"
