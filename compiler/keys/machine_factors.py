"""Cache key factors that do not depend on the model: versions, the machine, settings of the process."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from typing import Any

import torch

from piecegraph import __version__
from piecegraph.compiler.common.cuda_driver import driver_version
from piecegraph.compiler.keys.own_sources import digest_of_own_sources
from piecegraph.compiler.torch_compat.process_settings import cpu_capability, inductor_settings_digest, process_settings


def build_factors(sources: tuple[str, ...]) -> dict[str, Any]:
    """Return the versions that generate and run code, with a digest of our own sources that match the patterns."""
    return {
        "torch": {"version": str(torch.__version__), "git": str(torch.version.git_version)},
        "triton": version_of("triton"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "piecegraph": __version__,
        "sources": digest_of_own_sources(sources),
    }


@functools.cache
def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_factors(device: torch.device) -> dict[str, Any]:
    """Return the facts about this machine that code compiled for `device` depends on.

    Host code is part of every piece, so the CPU counts for a GPU too. The index of a GPU is in the code Inductor
    generates; processes that see one GPU each all call it 0.
    """
    found: dict[str, Any] = {"device": device.type, "cpu": _cpu()}
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        found["gpu"] = {
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "capability": f"{major}.{minor}",
            "driver": driver_version(),
            "cuda": torch.version.cuda,
        }
    return found


@functools.cache
def _cpu() -> dict[str, str]:
    """Return the facts about the CPU. Inductor compiles C++ for this very machine, so every instruction set counts."""
    flags = ""
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith(("flags", "Features"))), "")
            flags = " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        flags = platform.processor()
    return {
        "machine": platform.machine(),
        "isa": cpu_capability(),
        "flags": hashlib.sha256(flags.encode()).hexdigest()[:16],
    }


def settings_factors() -> dict[str, Any]:
    """Return the settings of this process that change what is traced or generated."""
    return {**process_settings(), "inductor": inductor_settings_digest()}
