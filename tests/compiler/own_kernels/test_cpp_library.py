"""Libraries of our own C++: built once, found again without a compiler, and never another source's."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor

from piecegraph.cache.store.keys import key_of
from piecegraph.cache.store.store import Store
from piecegraph.compiler.own_kernels import cpp_library
from piecegraph.compiler.own_kernels.cpp_library import FLAGS, NoLibrary, library_factors, library_of
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.environment import child_environment

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


def cache_in(folder: Path) -> CompileCache:
    return CompileCache(Store.open(folder / "cache", key_file=folder / "key"), True)


def source_in(folder: Path, answer: int) -> Path:
    file = folder / "answer.cpp"
    file.write_text(f'extern "C" int answer() {{ return {answer}; }}\n')
    return file


def answer_of(library: ctypes.CDLL) -> int:
    return int(library.answer())


@pytest.fixture
def no_compiler() -> Iterator[None]:
    with torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/c++",)}):
        yield


@needs_compiler
def test_it_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start needs no compiler; another source is built, under another key."""
    file = source_in(tmp_path, 41)
    assert answer_of(library_of(file, cache_in(tmp_path))) == 41
    (row,) = cache_in(tmp_path).store.list()  # type: ignore[union-attr]
    assert row.state == "complete" and row.key == key_of(library_factors(file.read_bytes()))
    with monkeypatch.context() as changed:
        changed.setattr(cpp_library, "_build", lambda *args: pytest.fail("it is there"))
        assert answer_of(library_of(file, cache_in(tmp_path))) == 41
    assert answer_of(library_of(source_in(tmp_path, 42), cache_in(tmp_path))) == 42
    assert len(cache_in(tmp_path).store.list()) == 2  # type: ignore[union-attr]


@needs_compiler
def test_a_folder_that_no_library_may_be_loaded_from_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refused)
    with pytest.raises(NoLibrary, match="failed to map segment"):
        library_of(source_in(tmp_path, 41), cache_in(tmp_path))


def test_the_key_knows_what_makes_a_library_another(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of(library_factors(b"a")), key_of(library_factors(b"b")), key_of(library_factors(b"a", FLAGS[:-1]))}
    monkeypatch.setenv("CXX", "another-c++")
    keys.add(key_of(library_factors(b"a")))
    monkeypatch.setattr(cpp_library, "machine_factors", lambda device: {"cpu": "another"})
    keys.add(key_of(library_factors(b"a")))
    assert len(keys) == 5


@needs_compiler
def test_a_library_that_was_changed_is_built_again(tmp_path: Path) -> None:
    file = source_in(tmp_path, 41)
    library_of(file, cache_in(tmp_path))
    (blob,) = (tmp_path / "cache" / "v1" / "blobs").iterdir()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    assert answer_of(library_of(file, cache_in(tmp_path))) == 41


@needs_compiler
def test_a_library_that_cannot_be_loaded_here_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, build = source_in(tmp_path, 41), cpp_library._build
    made = build(file.read_bytes(), file.name, FLAGS)
    with monkeypatch.context() as changed:
        changed.setattr(cpp_library, "_load", lambda library, name: None)
        changed.setattr(cpp_library, "_build", lambda *args: (made[0], b"of another system"))
        library_of(file, cache_in(tmp_path))
    assert answer_of(library_of(file, cache_in(tmp_path))) == 41


def test_without_a_compiler_the_reason_says_what_to_do(tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(NoLibrary, match=r"there is no C\+\+ compiler .*apt-get install g\+\+"):
        library_of(source_in(tmp_path, 41), cache_in(tmp_path))


@pytest.mark.parametrize("named", ["", "env g++"])
def test_a_compiler_that_CXX_does_not_name_is_the_reason(  # noqa: N802  # as the variable is spelt
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: 1 / 0)
    with pytest.raises(NoLibrary, match=rf"CXX='{re.escape(named)}' is no C\+\+ compiler that runs; name one program"):
        library_of(source_in(tmp_path, 41), cache_in(tmp_path))


@needs_compiler
def test_what_the_compiler_refuses_is_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "wrong.cpp"
    file.write_text("int f( {\n")
    with pytest.raises(NoLibrary, match=r"failed: .*wrong\.cpp"):
        library_of(file, cache_in(tmp_path))


@pytest.mark.slow
@needs_compiler
def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    file = source_in(tmp_path, 41)
    code = f"""
from pathlib import Path
from tests.compiler.own_kernels.test_cpp_library import answer_of, cache_in, library_of
print(answer_of(library_of(Path({str(file)!r}), cache_in(Path({str(tmp_path)!r})))))
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=child_environment({}))
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in started] == ["41", "41"]
    assert len(cache_in(tmp_path).store.list()) == 1  # type: ignore[union-attr]
