"""Triton on a machine without a GPU: it compiles for one, and what would be loaded onto it is noted.

`small` is a kernel of ours, `others` somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from piecegraph.passes.kernels.common import own_kernel as chosen
from piecegraph.passes.kernels.common.own_kernel import compile_with, own_kernel

TARGET = GPUTarget("cuda", 90, 32)


@own_kernel
@triton.jit  # type: ignore[untyped-decorator]
def small(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # compiled by Triton
    tl.store(x + tl.arange(0, SIZE), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def others(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # compiled by Triton
    tl.store(x + tl.arange(0, SIZE), 2.0)


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        pass


class NoGpu:
    """A driver of a GPU that is not there."""

    launcher_cls: ClassVar[type] = _Launcher

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[bytes] = []  # binaries, in the order they were loaded

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded.append(binary)
        return "module", name, 1, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""


def warm_up(kernel: Any, size: int = 16) -> Any:
    """What is compiled for a launch with `size`, and loaded."""
    compiled = kernel.warmup(torch.float32, SIZE=size, grid=(1,))
    compiled._init_handles()
    return compiled


def forget_compiled() -> None:
    """As in a new process."""
    for kernel in (small, others):
        kernel.device_caches.clear()


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NoGpu]:
    """Nothing compiled yet, Triton's own cache in `tmp_path / "triton"`, and nobody chosen to compile."""
    before = driver._active
    device = NoGpu()
    driver.set_active(device)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    compiles = chosen._Choice.compile
    compile_with(None)
    forget_compiled()
    yield device
    forget_compiled()
    compile_with(compiles)
    driver._active = before


def kept_by_triton(tmp_path: Path) -> set[str]:
    """Names of kernels in Triton's own cache."""
    return {path.stem for path in (tmp_path / "triton").rglob("*.cubin")}
