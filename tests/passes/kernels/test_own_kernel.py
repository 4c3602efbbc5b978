"""Who compiles kernels of ours can be chosen, and nobody else's are touched."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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


def test_a_hash_does_not_depend_on_which_kernel_was_compiled_first() -> None:
    """Of all kernels of attention, which share functions that read constants."""
    found = {order: hashes_in(order) for order in ("kernels", "reversed(kernels)")}
    assert len(found["kernels"]) >= 4
    assert found["kernels"] == found["reversed(kernels)"]


def hashes_in(order: str) -> dict[str, str]:
    """In a new process, of kernels hashed one after the other."""
    lines = (
        "import json",
        "from piecegraph.passes.kernels.own_kernel import hash_functions_called",
        "from piecegraph.runner.attention.kernels import decode, kv_write, prefill",
        "from piecegraph.passes.kernels import linear, sliced_linear",
        "modules = (decode, kv_write, prefill, linear, sliced_linear)",
        "kernels = [value for module in modules for name, value in vars(module).items() if name.endswith('_kernel')]",
        "kernels = [each for each in kernels if hasattr(each, 'cache_key')]",
        f"for each in {order}:",
        "    hash_functions_called(each)",
        "    each.cache_key",
        "print(json.dumps({each.__name__: each.cache_key for each in kernels}))",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
