"""Who compiles kernels of ours can be chosen, and nobody else's are touched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.passes.kernels.own_kernel import compile_with, own_kernel
from tests.compiler.triton_without_gpu import NoGpu, kept_by_triton, no_gpu, others, small, warm_up

__all__ = ["no_gpu"]

ROOT = Path(__file__).resolve().parents[3]
KERNELS = [
    file
    for folder in ("passes", "runner")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if "@triton.jit" in file.read_text()
]


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_kernel_of_the_package_is_marked(file: Path) -> None:
    text = file.read_text()
    assert len(re.findall(r"^@own_kernel\n@triton\.jit\b", text, re.MULTILINE)) == text.count("@triton.jit")


def test_until_somebody_chooses_triton_compiles(no_gpu: NoGpu, tmp_path: Path) -> None:
    compiled = warm_up(small)
    assert no_gpu.loaded == [compiled.kernel]
    assert kept_by_triton(tmp_path) == {"small"}


def test_whom_one_chooses_compiles_what_is_marked(no_gpu: NoGpu, tmp_path: Path) -> None:
    """Also where Triton was asked for another size before, and only until the choice is taken back."""
    asked = []

    def compile_one(plain: Any, src: Any, **how: Any) -> Any:
        asked.append((src.name, how["target"]))
        return plain(src, **how)

    warm_up(small, 16)
    compile_with(compile_one)
    warm_up(small, 32)
    warm_up(small, 32)
    warm_up(others, 32)
    compile_with(None)
    warm_up(small, 64)
    assert asked == [("small", no_gpu.get_current_target())]
    assert kept_by_triton(tmp_path) == {"small", "others"}


def test_what_the_interpreter_runs_is_left() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    before = dict(vars(function))
    assert own_kernel(function) is function
    assert vars(function) == before
