"""Compiled pieces of Inductor as bytes, and their loading."""

from __future__ import annotations

import contextlib
import importlib
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.private_folder import scratch_folder


class NotSavable(Exception):
    """An error for a compiled piece that torch cannot save. The message is the reason."""


def check_savable(graph_module: fx.GraphModule) -> None:
    """Raise `NotSavable` where torch would compile the piece and then not save it, because of a function it calls."""
    autograd_cache = importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
    try:
        for node in graph_module.graph.nodes:
            autograd_cache.check_node_safe(node)
    except Exception as error:  # whatever it is, torch takes it for a reason to save nothing
        raise NotSavable(_reason(error)) from error


def save_artifact(compiled: Any, path: Path) -> None:
    """Write the result of `standalone_compile` to `path`, for `load_artifact`. Raises `NotSavable`, and OSError."""
    try:
        compiled.save(path=str(path), format="binary")
    except (RuntimeError, AssertionError) as error:
        raise NotSavable(_reason(error)) from error


def artifact_bytes(compiled: Any) -> bytes | None:
    """Return the result of `standalone_compile` as bytes for `load_artifact`; None where torch cannot save it."""
    with scratch_folder() as folder:
        path = folder / "artifact"
        try:
            save_artifact(compiled, path)
        except NotSavable:
            return None
        return path.read_bytes()


def _reason(error: Exception) -> str:
    first_line = re.sub(r" at 0x[0-9a-f]+", "", next(iter(str(error).splitlines()), ""))
    return f"torch cannot save the compiled piece ({first_line.strip().rstrip('.')})"


def import_loader() -> float:
    """Import the modules that `load_artifact` and every artifact import; return the seconds it took.

    The first time takes more than a second, because generated code imports its library calls through the module of
    Inductor's templates.
    """
    begin = time.perf_counter()
    importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
    importlib.import_module("torch._inductor.compile_fx")
    return time.perf_counter() - begin


def load_artifact(data: bytes) -> Any:
    """Load the piece that `artifact.save(path=..., format="binary")` wrote. Call it inside `inductor_cache_dir`.

    The bytes are unpickled: they must have been authenticated, or just made by a child process. torch's own loader
    compares torch's sources with those of the artifact, which takes most of the time of a load; here the caller
    guarantees the same build.
    """
    from torch.utils._appending_byte_serializer import BytesReader

    artifacts = importlib.import_module("torch._inductor.standalone_compile").CacheCompiledArtifact
    reader = BytesReader(data)
    header = reader.read_bytes()
    assert header == artifacts.CACHE_HEADER, f"not an artifact of this format: {header!r}"
    reader.read_bytes()  # torch's digest of its sources
    key, content = reader.read_str(), reader.read_bytes()
    assert reader.is_finished(), "the artifact has bytes after its content"
    with torch.no_grad():
        assert torch.compiler.load_cache_artifacts(content) is not None, "torch finds nothing in the artifact"
        return artifacts._load_impl(contextlib.nullcontext(), key)


def kernels_in_use(folder: Path) -> set[str]:
    """Return the folders in Triton's cache of the kernels that modules loaded from Inductor's `folder` launch.

    An artifact holds fewer kernels: tuning, or halving blocks for the GPU at hand, replaces the compiled kernel by
    another one, and coordinate descent records its choice without the kernel.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    modules = [module for module in PyCodeCache.modules if Path(module.__file__ or "").is_relative_to(folder)]
    kernels = [value for module in modules for value in vars(module).values() if isinstance(value, CachingAutotuner)]
    hashes = {getattr(launcher, "cache_hash", None) for kernel in kernels for launcher in kernel.launchers}
    return {each for each in hashes if each is not None}
