"""Caches for kernels of a GPU that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.cache.store.store import Store
from piecegraph.compiler.own_kernels import store as kernel_store
from piecegraph.compiler.own_kernels.store import KernelStore
from piecegraph.compiler.store.compile_cache import CompileCache

GPU = torch.device("cuda", 0)
OF = "0" * 64
MACHINE: dict[str, Any] = {"device": "cuda", "gpu": {"capability": "9.0", "name": "NVIDIA H200"}}


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of every key."""
    monkeypatch.setattr(kernel_store, "machine_factors", lambda device: MACHINE)


def cache_in(tmp_path: Path) -> CompileCache:
    return CompileCache(Store.open(tmp_path / "cache", key_file=tmp_path / "key"), True)


def store_in(tmp_path: Path, of: str = OF) -> KernelStore:
    """As a new process has it, before it loads."""
    return KernelStore(cache_in(tmp_path), of, GPU)


def blobs_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "v1" / "blobs").iterdir())
