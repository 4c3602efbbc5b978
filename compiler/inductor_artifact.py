"""What Inductor compiled, as bytes and back."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def artifact_bytes(compiled: Any) -> bytes | None:
    """What `load_artifact` takes, of what `standalone_compile` returned; None where torch can save none of it."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-") as folder:
        path = Path(folder) / "artifact"
        try:
            compiled.save(path=str(path), format="binary")
        except (RuntimeError, AssertionError):
            return None
        return path.read_bytes()


def import_loader() -> float:
    """Import what `load_artifact` and every artifact import; the seconds it took. More than a second, the first time:
    generated code reaches for its library calls through the module that holds Inductor's templates."""
    begin = time.perf_counter()
    importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
    importlib.import_module("torch._inductor.compile_fx")
    return time.perf_counter() - begin


def load_artifact(data: bytes) -> Any:
    """The piece that `artifact.save(path=..., format="binary")` wrote. Unpickles: bytes that were authenticated, or
    that a process of ours has just made. Inside `inductor_cache_dir`.

    torch would compare its own sources with those it was made from, which takes most of the time of a load; whoever
    calls this knows them to be the same build.
    """
    from torch.utils._appending_byte_serializer import BytesReader

    artifacts = importlib.import_module("torch._inductor.standalone_compile").CacheCompiledArtifact
    reader = BytesReader(data)
    header = reader.read_bytes()
    assert header == artifacts.CACHE_HEADER, f"an artifact of another kind: {header!r}"
    reader.read_bytes()  # torch's digest of its sources
    key, content = reader.read_str(), reader.read_bytes()
    assert reader.is_finished(), "an artifact with more to it than its header says"
    with torch.no_grad():
        assert torch.compiler.load_cache_artifacts(content) is not None, "an artifact that torch finds nothing in"
        return artifacts._load_impl(contextlib.nullcontext(), key)


def kernels_in_use(folder: Path) -> set[str]:
    """Folders in Triton's cache of the kernels that modules loaded from below Inductor's `folder` would launch.

    Those an artifact was saved with are fewer: a kernel that was tuned, or whose blocks Inductor halved for the GPU it
    found, is another than it was compiled as, and what coordinate descent chose is written down without its kernel.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    modules = [module for module in PyCodeCache.modules if Path(module.__file__ or "").is_relative_to(folder)]
    kernels = [value for module in modules for value in vars(module).values() if isinstance(value, CachingAutotuner)]
    hashes = {getattr(launcher, "cache_hash", None) for kernel in kernels for launcher in kernel.launchers}
    return {each for each in hashes if each is not None}
