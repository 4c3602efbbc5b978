"""What Inductor keeps lies in folders of ours while we compile and load, and the process is as before after it."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.cpu_vec_isa import VecISA

import piecegraph as pg
from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.compiler.inductor.caches import child_environment, inductor_cache_dir

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONSAFEPATH")


def settings() -> list[Any]:
    names = ("_HEADER_DIR", "_HEADER_LOCK_DIR", "_precompile_header")
    return [*map(os.environ.get, VARIABLES), *(getattr(codecache, name) for name in names), VecISA.check_build]


def test_the_process_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[0], "mine")
    monkeypatch.delenv(VARIABLES[1], raising=False)
    before = settings()

    def compile_in(inductor: Path, triton: Path) -> None:
        with inductor_cache_dir(inductor, triton):
            assert [os.environ[name] for name in VARIABLES[:2]] == [str(inductor), str(triton)]
            raise KeyError

    with pytest.raises(KeyError):
        compile_in(tmp_path / "inductor", tmp_path / "triton")
    assert settings() == before


def test_headers_lie_in_one_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for every compile of the process, and what Inductor precompiled elsewhere before is not used."""
    monkeypatch.setattr(codecache, "_precompile_header", functools.cache(lambda *names: f"elsewhere/{names}"))
    found: set[tuple[Any, ...]] = set()
    for name in ("one", "other"):
        with inductor_cache_dir(tmp_path / name, tmp_path / "triton"):
            found.add((codecache._HEADER_DIR, Path(codecache._HEADER_LOCK_DIR).parent, codecache._precompile_header))
    ((folder, of_locks, function),) = found
    assert Path(folder) == of_locks
    assert of_locks.parents[1] == private_folder("any").parent
    assert function is not codecache._precompile_header


def test_vector_instructions_are_tried_out_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Python that looks for no module in the working directory."""

    def check_build(isa: VecISA, code: str) -> bool:
        seen.append([os.environ[name] for name in (VARIABLES[0], VARIABLES[2])])
        return True

    seen: list[list[str]] = []
    monkeypatch.setattr(VecISA, "check_build", check_build)
    for name in ("one", "other"):
        with inductor_cache_dir(tmp_path / name, tmp_path / "triton"):
            headers = Path(codecache._HEADER_DIR)
            assert VecISA().check_build("")
            assert os.environ[VARIABLES[0]] == str(tmp_path / name)
    assert seen == [[str(headers.parent), "1"]] * 2


def test_a_compile_process_imports_what_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: the working directory counts only where it does here."""
    monkeypatch.setattr(sys, "path", ["/somewhere", "/else"])
    environment = child_environment(tmp_path / "inductor", tmp_path / "triton")
    assert (environment["PYTHONPATH"], environment["PYTHONSAFEPATH"]) == ("/somewhere:/else", "1")
    monkeypatch.setattr(sys, "path", ["", "/else"])
    assert child_environment(tmp_path, tmp_path)["PYTHONPATH"] == ".:/else"


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + 1).log() * 3


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Somebody's code lies where Inductor would look for its precompiled header. How often that ran, in whatever
    process, since it was last asked."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("POISON_MARK", str(mark))
    default = Path(codecache.default_cache_dir()) / "precompiled_headers"
    assert default.is_relative_to(tmp_path)
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(default))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(default / "locks"))
    inductors_own: Any = codecache._precompile_header
    monkeypatch.setattr(codecache, "_precompile_header", functools.cache(inductors_own.__wrapped__))
    build = codecache._worker_compile_cpp

    def plant(lock: str, builders: Any) -> None:
        """Where a header of the default folder would be precompiled, it has been there all along."""
        for builder in builders:
            target = Path(builder.get_target_file_path())
            if target.parent == default and not target.exists():
                target.write_bytes(b"no precompiled header: the text counts")
                header = target.with_suffix("")
                header.write_text(header.read_text() + POISON)
        build(lock, builders)

    monkeypatch.setattr(codecache, "_worker_compile_cpp", plant)

    def count() -> int:
        found = len(mark.read_bytes()) if mark.exists() else 0
        mark.unlink(missing_ok=True)
        return found

    return count


POISON = """
#include <cstdlib>
#include <cstdio>
static int poison = [] {
    if (FILE* file = fopen(getenv("POISON_MARK"), "ab")) { fputc('x', file); fclose(file); }
    return 0;
}();
"""


@pytest.mark.slow
def test_a_planted_header_leaves_no_mark(
    tmp_path: Path, marks: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compiled into what Inductor makes by itself, which this shows first, and into nothing of ours, in this
    process and in those it starts; nor is there what could be planted later."""
    example = torch.linspace(-1, 1, 24).reshape(4, 6)
    wanted = Small()(example)
    with monkeypatch.context() as inductors:
        inductors.setenv(VARIABLES[0], str(tmp_path / "inductor"))
        with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
            torch.testing.assert_close(torch.compile(Small())(example), wanted)
    planted = {path: path.read_bytes() for path in Path(codecache._HEADER_DIR).iterdir() if path.is_file()}
    assert {path.suffix for path in planted} == {".h", ".gch"}
    assert marks() > 0
    for workers in (1, 2):
        config = pg.CompileConfig(compile_workers=workers, cache=False, split_ops=())
        compiled = pg.compile(Small(), config, dynamic_dims={"x": {0: "rows"}}, example_inputs=(example,))
        torch.testing.assert_close(compiled(example), wanted)
        compiled.close()
        assert marks() == 0
    assert {path: path.read_bytes() for path in Path(codecache._HEADER_DIR).iterdir() if path.is_file()} == planted
