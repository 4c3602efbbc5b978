"""The compiler of our kernels can be chosen, and nobody else's kernels are touched."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from piecegraph.passes.kernels.common.own_kernel import (
    PARSE_ATTEMPTS,
    NotKept,
    compile_with,
    functions_called,
    hash_functions_called,
    loading_only,
    may_be_kept,
    own_kernel,
    parse_beside_others,
)
from tests.compiler.triton_without_gpu import NoGpu, kept_by_triton, no_gpu, others, small, warm_up

__all__ = ["no_gpu"]

ROOT = Path(__file__).resolve().parents[4]


@triton.jit
def adds_one(x):  # type: ignore[no-untyped-def]  # compiled by Triton
    return x + 1.0


@triton.jit
def adds_two(x):  # type: ignore[no-untyped-def]  # compiled by Triton
    return adds_one(adds_one(x))


@own_kernel
@triton.jit  # type: ignore[untyped-decorator]
def calls_twice(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # compiled by Triton
    tl.store(x + tl.arange(0, SIZE), adds_two(adds_one(0.0)))


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


def test_triton_compiles_marked_kernels_by_default(no_gpu: NoGpu, tmp_path: Path) -> None:
    compiled = warm_up(small)
    assert no_gpu.loaded == [compiled.kernel]
    assert kept_by_triton(tmp_path) == {"small"}


def test_a_text_is_parsed_again_where_another_thread_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser then ends with a `SystemError`. Any other error is the caller's, and so is one that stays."""
    raised: list[Exception] = []
    plain = ast.parse

    def disturbed(text: str) -> ast.Module:
        if raised:
            raise raised.pop()
        return plain(text)

    monkeypatch.setattr(ast, "parse", disturbed)
    parse_beside_others(adds_two)
    monkeypatch.setattr(adds_two, "hash", None)
    raised += [SystemError("AST constructor recursion depth mismatch (before=51, after=46)")] * (PARSE_ATTEMPTS - 1)
    assert "recursion" not in adds_two.cache_key
    assert not raised
    raised += [SystemError("for good")] * PARSE_ATTEMPTS
    with pytest.raises(SystemError, match="for good"):
        adds_two.parse()
    raised.append(SyntaxError("not Python"))
    with pytest.raises(SyntaxError, match="not Python"):
        adds_two.parse()


def test_functions_that_a_kernel_calls_parse_so_too(no_gpu: NoGpu) -> None:
    warm_up(calls_twice)
    assert functions_called(calls_twice) == [adds_one, adds_two]
    assert all("parse" in vars(function) for function in (calls_twice, adds_two, adds_one))


def test_the_chosen_compiler_compiles_marked_kernels(no_gpu: NoGpu, tmp_path: Path) -> None:
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


def test_a_kernel_is_not_compiled_where_it_is_only_to_be_loaded(no_gpu: NoGpu, tmp_path: Path) -> None:
    """A kernel that is not ours is still compiled, and after the block all are."""
    with loading_only():
        with pytest.raises(NotKept, match="small"):
            warm_up(small)
        warm_up(others)
    assert kept_by_triton(tmp_path) == {"others"}
    warm_up(small)
    assert kept_by_triton(tmp_path) == {"small", "others"}


def test_a_kernel_may_be_kept_if_it_is_marked_and_a_compiler_is_chosen(no_gpu: NoGpu) -> None:
    assert not may_be_kept(small) and not may_be_kept(others)
    compile_with(lambda plain, src, **how: plain(src, **how))
    assert may_be_kept(small) and not may_be_kept(others)


def test_kernels_of_the_interpreter_are_left_unchanged() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    before = dict(vars(function))
    assert own_kernel(function) is function
    assert vars(function) == before


def test_functions_are_hashed_before_those_that_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself is not: Triton does that."""
    hashed = []

    def cache_key(function: Any) -> str:
        hashed.append(function.fn.__name__)
        return ""

    monkeypatch.setattr(triton.JITFunction, "cache_key", property(cache_key))
    hash_functions_called(calls_others)
    assert set(hashed) >= {"reads_a_constant", "calls_one"} and "calls_others" not in hashed
    assert hashed.index("reads_a_constant") < hashed.index("calls_one")


FACTOR = tl.constexpr(3.0)


@triton.jit
def reads_a_constant(x):  # type: ignore[no-untyped-def]
    return x * FACTOR


@triton.jit
def calls_one(x):  # type: ignore[no-untyped-def]
    return reads_a_constant(x) + tl.sum(x, 0)


@triton.jit
def calls_others(x):  # type: ignore[no-untyped-def]
    value = tl.load(x + tl.arange(0, 16))
    tl.store(x, calls_one(value) + reads_a_constant(value))


@triton.jit
def calls_none(x):  # type: ignore[no-untyped-def]
    tl.store(x, reads_a_constant(tl.load(x)))


@pytest.mark.slow
def test_a_hash_does_not_depend_on_which_kernel_was_hashed_first() -> None:
    """With Triton 3.6 that of `calls_others` does, unless its functions are hashed first."""
    assert hashes_in("calls_others, calls_none") == hashes_in("calls_none, calls_others")


def hashes_in(order: str) -> list[str]:
    """Return the hashes of kernels, computed one after the other in a new process."""
    lines = (
        f"from tests.passes.kernels.common.test_own_kernel import {order}",
        "from piecegraph.passes.kernels.common.own_kernel import hash_functions_called",
        f"for each in {order}:",
        "    hash_functions_called(each)",
        "    each.cache_key",
        "print(calls_others.cache_key, calls_none.cache_key)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split()


@pytest.mark.slow
def test_where_there_is_no_triton_the_runner_imports_all_the_same() -> None:
    """The runner imports on a machine without Triton, which only a launch needs."""
    lines = ("import sys", "sys.modules['triton'] = None", "import piecegraph.runner.startup.compiling.compile_model")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT)
